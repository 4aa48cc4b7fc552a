// float32 kernels for a CPU: the small operations of a decoder layer and products of a few rows with large weights.
//
// All arrays are dense and row-major. Nothing here throws.

#include "common.h"

using namespace mfx;

extern "C" {

// Sets the number of threads; a forked child starts a pool of its own.
void mfx_set_threads(int count) {
  threads = count;
  static const int registered = pthread_atfork(nullptr, nullptr, [] {
    pool = nullptr;
    new (&pool_in_use) std::mutex;
  });
  (void)registered;
}

// out [m, n] = x [m, k] w [n, k]^T + bias [n]; bias may be null.
void mfx_linear(const float* x, const float* w, const float* bias, float* out, int64_t m, int64_t n, int64_t k) {
  parallel(n, m * k, [=](int64_t begin, int64_t end) {
    int64_t j = begin;
    for (; j + 4 <= end; j += 4) dot_rows<4, true>(x, w + j * k, bias ? bias + j : nullptr, out + j, m, n, k);
    for (; j < end; ++j) dot_rows<1, true>(x, w + j * k, bias ? bias + j : nullptr, out + j, m, n, k);
  }, true);
}

// out [rows, dim] = rms_norm(x) * weight.
void mfx_rms_norm(const float* x, const float* weight, float* out, int64_t rows, int64_t dim, float eps) {
  parallel(rows, dim, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      scale_by(x + row * dim, inverse_rms(x + row * dim, dim, eps), weight, out + row * dim, dim);
    }
  });
}

// total [rows, dim] = x + update, out = rms_norm(total) * weight.
void mfx_add_rms_norm(const float* x, const float* update, const float* weight, float* total, float* out, int64_t rows,
                      int64_t dim, float eps) {
  parallel(rows, dim, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t start = row * dim;
      for (int64_t i = 0; i < dim; ++i) total[start + i] = x[start + i] + update[start + i];
      scale_by(total + start, inverse_rms(total + start, dim, eps), weight, out + start, dim);
    }
  });
}

// out [rows, size] = silu(gate) * up for x [rows, 2 size] with gates in even and ups in odd columns; a limit above 0
// bounds gates from above and ups on both sides.
void mfx_swiglu(const float* x, float* out, int64_t rows, int64_t size, float limit) {
  const float bound = limit > 0 ? limit : std::numeric_limits<float>::infinity();
  const int64_t count = rows * size;
  parallel((count + kLanes - 1) / kLanes, 2 * kLanes, [=](int64_t begin, int64_t end) {
    for (int64_t at = begin * kLanes; at < std::min(end * kLanes, count); at += kLanes) {
      const int64_t part = std::min<int64_t>(kLanes, count - at);
      float gates[kLanes] = {}, ups[kLanes] = {};
      for (int i = 0; i < part; ++i) {
        gates[i] = x[2 * (at + i)];
        ups[i] = x[2 * (at + i) + 1];
      }
      const vec result = clamped_swiglu(load(gates), load(ups), bound);
      if (part == kLanes) {
        store(out + at, result);
      } else {
        store_part(out + at, result, part);
      }
    }
  });
}

// Takes qkv [batch * length, groups, stored, dim] apart, of which the first `heads` are queries, the last two key and value:
// query [batch, groups, heads, length, dim], key and value [batch, groups, length, dim]; queries and keys are normalised
// (unless the weights are null), and their first elements rotated by cos and sin [batch * length, rotary_dim].
void mfx_qkv_heads(const float* qkv, const float* cos, const float* sin, const float* query_norm, const float* key_norm,
                   float* query, float* key, float* value, int64_t batch, int64_t length, int64_t groups, int64_t stored,
                   int64_t heads, int64_t dim, int64_t rotary_dim, float eps) {
  parallel(batch * length * groups, 4 * (heads + 2) * dim, [=](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t token = item / groups, group = item % groups;
      const int64_t row = token / length, position = token % length;
      const float *from = qkv + item * stored * dim, *cosine = cos + token * rotary_dim, *sine = sin + token * rotary_dim;
      for (int64_t head = 0; head < heads; ++head) {
        float* to = query + (((row * groups + group) * heads + head) * length + position) * dim;
        norm_and_rotate(from + head * dim, query_norm, eps, cosine, sine, to, dim, rotary_dim);
      }
      const int64_t to = ((row * groups + group) * length + position) * dim;
      norm_and_rotate(from + (stored - 2) * dim, key_norm, eps, cosine, sine, key + to, dim, rotary_dim);
      std::copy_n(from + (stored - 1) * dim, dim, value + to);
    }
  });
}

// scores [batch, groups * heads, length, slots] become softmax(scale * scores + bias), in place; bias [bias_batch,
// length, slots] with bias_batch batch or 1.
void mfx_attention_weights(float* scores, const float* bias, int64_t batch, int64_t heads, int64_t length, int64_t slots,
                           int64_t bias_batch, float scale) {
  parallel(batch * heads * length, 8 * slots, [=](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t row = item / (heads * length), position = item % length;
      float* values = scores + item * slots;
      softmax(values, bias + ((bias_batch == 1 ? 0 : row) * length + position) * slots, scale, values, slots);
    }
  });
}

// Attention of one new token a row: query [batch, groups, heads, dim], key and value [batch, groups, slots, dim], bias
// [bias_batch, slots], out [batch, groups, heads, dim], scratch [batch, groups, slots]. Slots behind the last one that a
// row may see are not read; a row that may see none, a pad, sees slot 0.
void mfx_attend(const float* query, const float* key, const float* value, const float* bias, float* out, float* scratch,
                int64_t batch, int64_t groups, int64_t heads, int64_t dim, int64_t slots, int64_t bias_batch, float scale) {
  parallel(batch * groups, 2 * heads * dim * slots, [=](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const float* biases = bias + (bias_batch == 1 ? 0 : item / groups) * slots;
      int64_t used = slots;
      while (used > 1 && biases[used - 1] < -1e37f) --used;
      const float *keys = key + item * slots * dim, *values = value + item * slots * dim;
      float* scores = scratch + item * slots;
      for (int64_t head = 0; head < heads; ++head) {
        const float* q = query + (item * heads + head) * dim;
        float* mixed = out + (item * heads + head) * dim;
        dot_rows<1>(keys, q, nullptr, scores, used, 1, dim);
        softmax(scores, biases, scale, scores, used);
        std::fill_n(mixed, dim, 0.0f);
        for (int64_t slot = 0; slot < used; ++slot) {
          for (int64_t i = 0; i < dim; ++i) mixed[i] += scores[slot] * values[slot * dim + i];
        }
      }
    }
  }, true);
}

}  // extern "C"
