// Hyper-connections: mixing weights with their Sinkhorn iteration, and the mixes of the streams of a token.

#include <cmath>

#include "common.h"

namespace {

using namespace mfx;

inline float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

// softmax of every row, then columns and rows divided by their sums in turn; comb [n, n].
inline void doubly_stochastic(float* comb, int64_t n, int64_t iterations, float eps) {
  for (int64_t i = 0; i < n; ++i) {
    float* row = comb + i * n;
    const float top = *std::max_element(row, row + n);
    float total = 0;
    for (int64_t j = 0; j < n; ++j) total += row[j] = std::exp(row[j] - top);
    for (int64_t j = 0; j < n; ++j) row[j] = row[j] / total + eps;
  }
  for (int64_t step = 0; step < 2 * iterations - 1; ++step) {
    const int64_t outer = step % 2 ? n : 1, inner = step % 2 ? 1 : n;
    for (int64_t i = 0; i < n; ++i) {
      float total = eps;
      for (int64_t j = 0; j < n; ++j) total += comb[i * outer + j * inner];
      const float factor = 1 / total;
      for (int64_t j = 0; j < n; ++j) comb[i * outer + j * inner] *= factor;
    }
  }
}

}  // namespace

extern "C" {

// streams [rows, n, dim]; mixes [rows, 2 n + n^2], the product of the unnormalised streams with the mapping, or [rows, n]
// for the head, whose post and comb are null and which has one alpha. Out: collapsed [rows, dim], pre [rows, n], post [rows, n],
// comb [rows, n, n].
void mfx_hyper_collapse(const float* streams, const float* mixes, const float* alpha, const float* bias,
                        float* collapsed, float* pre, float* post, float* comb, int64_t rows, int64_t n, int64_t dim,
                        int64_t iterations, float eps, float norm_eps) {
  const int64_t width = post ? 2 * n + n * n : n;
  parallel(rows, 4 * n * dim, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float *from = streams + row * n * dim, *mix = mixes + row * width;
      const float factor = inverse_rms(from, n * dim, norm_eps);
      float *weights = pre + row * n, *out = collapsed + row * dim;
      for (int64_t j = 0; j < n; ++j) weights[j] = sigmoid(mix[j] * factor * alpha[0] + bias[j]) + eps;
      std::fill_n(out, dim, 0.0f);
      for (int64_t j = 0; j < n; ++j) {
        for (int64_t i = 0; i < dim; ++i) out[i] += weights[j] * from[j * dim + i];
      }
      if (!post) continue;
      for (int64_t j = 0; j < n; ++j) post[row * n + j] = 2 * sigmoid(mix[n + j] * factor * alpha[1] + bias[n + j]);
      float* matrix = comb + row * n * n;
      for (int64_t j = 0; j < n * n; ++j) matrix[j] = mix[2 * n + j] * factor * alpha[2] + bias[2 * n + j];
      doubly_stochastic(matrix, n, iterations, eps);
    }
  });
}

// out [rows, n, dim]: stream k is post_k update + sum_j comb_jk stream_j.
void mfx_hyper_expand(const float* update, const float* streams, const float* post, const float* comb, float* out,
                      int64_t rows, int64_t n, int64_t dim) {
  parallel(rows * n, 2 * n * dim, [=](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t row = item / n, k = item % n;
      float* to = out + item * dim;
      for (int64_t i = 0; i < dim; ++i) to[i] = post[item] * update[row * dim + i];
      for (int64_t j = 0; j < n; ++j) {
        const float weight = comb[(row * n + j) * n + k], *from = streams + (row * n + j) * dim;
        for (int64_t i = 0; i < dim; ++i) to[i] += weight * from[i];
      }
    }
  });
}

}  // extern "C"
