// Multi-head latent attention of a few new tokens: projections taken apart, and attention over the latents themselves.

#include "common.h"

namespace {

using namespace mfx;

// Slots of the cache that all heads of a thread work on before the next ones: they stay in its second-level cache.
constexpr int64_t kTile = 64;

// Rotates pairs of x, (x[2i], x[2i+1]) or (x[i], x[i+dim/2]), into (out[i], out[i+dim/2]).
inline void rotate(const float* x, const float* cos, const float* sin, float* out, int64_t dim, bool interleaved) {
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float first = interleaved ? x[2 * i] : x[i];
    const float second = interleaved ? x[2 * i + 1] : x[i + half];
    out[i] = first * cos[i] - second * sin[i];
    out[i + half] = second * cos[i] + first * sin[i];
  }
}

// out[m] += sum over r of factors[m][r] * rows[r], for M outputs of V vectors, which stay in registers.
template <int M, int V>
inline void mix_tile(const float* factors, int64_t factor_stride, const float* rows, int64_t row_stride, int64_t count,
                     float* out, int64_t out_stride) {
  vec total[M][V];
  for (int m = 0; m < M; ++m) {
    for (int v = 0; v < V; ++v) total[m][v] = load(out + m * out_stride + v * kLanes);
  }
  for (int64_t r = 0; r < count; ++r) {
    vec values[V];
    for (int v = 0; v < V; ++v) values[v] = load(rows + r * row_stride + v * kLanes);
    for (int m = 0; m < M; ++m) {
      for (int v = 0; v < V; ++v) total[m][v] += values[v] * factors[m * factor_stride + r];
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int v = 0; v < V; ++v) store(out + m * out_stride + v * kLanes, total[m][v]);
  }
}

template <int M>
inline void mix_block(const float* factors, int64_t factor_stride, const float* rows, int64_t row_stride, int64_t count,
                      float* out, int64_t out_stride, int64_t size) {
  constexpr int kWide = 8 / M;
  int64_t at = 0;
  for (; at + kWide * kLanes <= size; at += kWide * kLanes) {
    mix_tile<M, kWide>(factors, factor_stride, rows + at, row_stride, count, out + at, out_stride);
  }
  for (; at + kLanes <= size; at += kLanes) {
    mix_tile<M, 1>(factors, factor_stride, rows + at, row_stride, count, out + at, out_stride);
  }
  for (; at < size; ++at) {
    for (int m = 0; m < M; ++m) {
      float total = out[m * out_stride + at];
      for (int64_t r = 0; r < count; ++r) {
        total = __builtin_fmaf(rows[r * row_stride + at], factors[m * factor_stride + r], total);
      }
      out[m * out_stride + at] = total;
    }
  }
}

// out[i] += factors[i] rows for m outputs: a product with a matrix whose rows are summed instead of dotted.
inline void mix_rows(const float* factors, int64_t factor_stride, const float* rows, int64_t row_stride, int64_t count,
                     float* out, int64_t out_stride, int64_t size, int64_t m) {
  int64_t i = 0;
  for (; i + 4 <= m; i += 4) {
    mix_block<4>(factors + i * factor_stride, factor_stride, rows, row_stride, count, out + i * out_stride, out_stride,
                 size);
  }
  for (; i < m; ++i) {
    mix_block<1>(factors + i * factor_stride, factor_stride, rows, row_stride, count, out + i * out_stride, out_stride,
                 size);
  }
}

}  // namespace

extern "C" {

// Takes fused [rows, query_size + size + rope] apart: query [rows, query_size], normalised unless query_norm is null, and
// latent [rows, size + rope]: the normalised latent and the key rotated by cos and sin [rows, rope].
void mfx_split_latent(const float* fused, const float* cos, const float* sin, const float* query_norm,
                      const float* latent_norm, float* query, float* latent, int64_t rows, int64_t query_size, int64_t size,
                      int64_t rope, int64_t interleaved, float eps) {
  const int64_t width = query_size + size + rope;
  parallel(rows, 2 * width, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* from = fused + row * width;
      float *to_query = query + row * query_size, *to_latent = latent + row * (size + rope);
      if (query_norm) {
        scale_by(from, inverse_rms(from, query_size, eps), query_norm, to_query, query_size);
      } else {
        std::copy_n(from, query_size, to_query);
      }
      from += query_size;
      scale_by(from, inverse_rms(from, size, eps), latent_norm, to_latent, size);
      rotate(from + size, cos + row * rope, sin + row * rope, to_latent + size, rope, interleaved);
    }
  });
}

// out [batch, heads, length, size + rope]: for query [batch * length, heads, plain + rope] the product of its plain part
// with the head's first rows of weight [heads, plain + values, size], and the rotated rest.
void mfx_absorb_query(const float* query, const float* weight, const float* cos, const float* sin, float* out,
                      int64_t batch, int64_t length, int64_t heads, int64_t plain, int64_t values, int64_t size,
                      int64_t rope, int64_t interleaved) {
  const int64_t rows = batch * length, head_size = plain + rope, width = size + rope;
  parallel(heads, 2 * rows * plain * size, [=](int64_t begin, int64_t end) {
    for (int64_t head = begin; head < end; ++head) {
      const float* keys = weight + head * (plain + values) * size;
      for (int64_t row = 0; row < batch; ++row) {
        const float* from = query + (row * length * heads + head) * head_size;
        float* to = out + (row * heads + head) * length * width;
        for (int64_t at = 0; at < length; ++at) {
          const int64_t token = row * length + at;
          std::fill_n(to + at * width, size, 0.0f);
          rotate(from + at * heads * head_size + plain, cos + token * rope, sin + token * rope, to + at * width + size,
                 rope, interleaved);
        }
      }
      // With one new token a row the rows of the batch are what shares the weight, else the tokens of each row.
      const int64_t groups = length == 1 ? 1 : batch, members = length == 1 ? batch : length;
      for (int64_t group = 0; group < groups; ++group) {
        const float* from = query + (group * members * heads + head) * head_size;
        float* to = out + (group * heads + head) * length * width;
        mix_rows(from, heads * head_size, keys, size, plain, to, length == 1 ? heads * width : width, size, members);
      }
    }
  }, true);
}

// Attention of one new token a row: query [batch, heads, width] over latent [batch, slots, width], whose first `size`
// columns are mixed to out [heads, batch, size]; bias [bias_batch, slots], scratch [batch, heads, slots]. Slots behind the
// last one that a row may see are not read; a row that may see none, a pad, sees slot 0.
void mfx_attend_latent(const float* query, const float* latent, const float* bias, float* out, float* scratch,
                       int64_t batch, int64_t heads, int64_t slots, int64_t width, int64_t size, int64_t bias_batch,
                       float scale) {
  parallel(batch * heads, 4 * width * slots, [=](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t row = begin / heads, first = begin % heads, count = std::min(heads - first, end - begin);
      const float* biases = bias + (bias_batch == 1 ? 0 : row) * slots;
      int64_t used = slots;
      while (used > 1 && biases[used - 1] < -1e37f) --used;
      const float *latents = latent + row * slots * width, *queries = query + begin * width;
      float *scores = scratch + begin * slots, *mixed = out + (first * batch + row) * size;
      for (int64_t tile = 0; tile < used; tile += kTile) {
        const int64_t stop = std::min(tile + kTile, used);
        for (int64_t head = 0; head < count; head += 4) {
          const int64_t part = std::min<int64_t>(4, count - head);
          const float* q = queries + head * width;
          float* to = scores + head * slots;
          int64_t slot = tile;
          for (; slot + 4 <= stop; slot += 4) dot_rows<4, true>(q, latents + slot * width, nullptr, to + slot, part, slots, width);
          for (; slot < stop; ++slot) dot_rows<1, true>(q, latents + slot * width, nullptr, to + slot, part, slots, width);
        }
      }
      for (int64_t head = 0; head < count; ++head) {
        softmax(scores + head * slots, biases, scale, scores + head * slots, used);
        std::fill_n(mixed + head * batch * size, size, 0.0f);
      }
      for (int64_t tile = 0; tile < used; tile += kTile) {
        mix_rows(scores + tile, slots, latents + tile * width, width, std::min(kTile, used - tile), mixed, batch * size,
                 size, count);
      }
      begin += count;
    }
  }, true);
}

// out [rows, heads, values]: products of mixed [heads, rows, size] with the head's last rows of weight [heads, plain +
// values, size].
void mfx_latent_values(const float* mixed, const float* weight, float* out, int64_t rows, int64_t heads, int64_t plain,
                       int64_t values, int64_t size) {
  parallel(heads * values, 2 * rows * size, [=](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t head = begin / values, first = begin % values, stop = std::min(values, first + end - begin);
      const float *x = mixed + head * rows * size, *w = weight + (head * (plain + values) + plain) * size;
      float* to = out + head * values;
      int64_t j = first;
      for (; j + 4 <= stop; j += 4) dot_rows<4, true>(x, w + j * size, nullptr, to + j, rows, heads * values, size);
      for (; j < stop; ++j) dot_rows<1, true>(x, w + j * size, nullptr, to + j, rows, heads * values, size);
      begin += stop - first;
    }
  }, true);
}

}  // extern "C"
