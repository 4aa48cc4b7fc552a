// float32 kernels of the gated delta net (arXiv 2412.06464): its convolution, its recurrence and its gated norm.
//
// A column of a head's state changes by itself, so the recurrence runs over all tokens for a few columns at a time, which
// then stay in the first cache. That beats the chunked form here, and the result does not depend on how a prompt is cut.

#include <cmath>

#include "common.h"

namespace {

using namespace mfx;

constexpr int64_t kChannels = 4 * kLanes;
constexpr int64_t kBlock = 16 * kLanes;  // channels of a convolution that are worked on together
constexpr int64_t kTaps = 8;             // taps whose factors are kept at hand
constexpr int64_t kLocal = 256 * kChannels;  // floats of the state that are worked on in a buffer of their own
constexpr float kL2Eps = 1e-6f;

inline vec silu(vec x) { return x / (exp(-x) + 1.0f); }

// 1 / sqrt(sum(x^2) + eps)
inline float inverse_length(const float* x, int64_t dim) {
  return inverse_rms(x, dim, kL2Eps / dim) / std::sqrt(static_cast<float>(dim));
}

// Convolves one row's channels from `first` up to `last`.
void convolve(const float* x, int64_t stride, const float* past, const float* weight, float* out, int64_t length,
              int64_t channels, int64_t taps, int64_t first, int64_t last) {
  const int64_t before = taps - 1;
  vec factors[kBlock / kLanes][kTaps];
  const auto gathered = [=](int64_t at, int64_t tap) {
    float values[kLanes] = {};
    for (int64_t i = 0; i < std::min<int64_t>(kLanes, last - at); ++i) values[i] = weight[(at + i) * taps + tap];
    return load(values);
  };
  for (int64_t at = first; at < last; at += kLanes) {
    for (int64_t tap = 0; tap < std::min(taps, kTaps); ++tap) factors[(at - first) / kLanes][tap] = gathered(at, tap);
  }
  for (int64_t token = 0; token < length; ++token) {
    for (int64_t at = first; at < last; at += kLanes) {
      const int64_t count = std::min<int64_t>(kLanes, last - at);
      vec total = {};
      for (int64_t tap = 0; tap < taps; ++tap) {
        const int64_t source = token - before + tap;
        if (source < 0 && !past) continue;
        const float* values = at + (source < 0 ? past + (before + source) * channels : x + source * stride);
        const vec factor = tap < kTaps ? factors[(at - first) / kLanes][tap] : gathered(at, tap);
        total += (count == kLanes ? load(values) : load_part(values, count, 0)) * factor;
      }
      if (count == kLanes) {
        store(out + token * channels + at, silu(total));
      } else {
        store_part(out + token * channels + at, silu(total), count);
      }
    }
  }
}

// Template arguments lose the attributes of `vec`, so its alignment is that of memcpy.
template <class V>
inline V get(const float* p) {
  V value;
  __builtin_memcpy(&value, p, sizeof(V));
  return value;
}
template <class V>
inline void put(float* p, V value) {
  __builtin_memcpy(p, &value, sizeof(V));
}

struct Head {
  const float *query, *key, *value, *beta, *g;  // of the first token
  int64_t stride, gate_stride, out_stride;      // to the next token
  float* out;
  int64_t length, key_dim;
};

// Runs all tokens for N vectors of columns of the state, whose rows are `width` floats apart.
template <class V, int N>
void columns(const Head& head, float* state, int64_t width) {
  constexpr int step = sizeof(V) / sizeof(float);
  const int64_t dim = head.key_dim;
  const float scale = 1 / std::sqrt(static_cast<float>(dim));
  for (int64_t token = 0; token < head.length; ++token) {
    const float *query = head.query + token * head.stride, *key = head.key + token * head.stride;
    const float *value = head.value + token * head.stride;
    const float decay = std::exp(head.g[token * head.gate_stride]), beta = head.beta[token * head.gate_stride];
    const float key_norm = inverse_length(key, dim), query_norm = inverse_length(query, dim) * scale;

    V told[2][N] = {};  // two sums side by side: one would wait for itself
    int64_t i = 0;
    for (; i + 2 <= dim; i += 2) {
      for (int n = 0; n < N; ++n) {
        told[0][n] += key[i] * get<V>(state + i * width + n * step);
        told[1][n] += key[i + 1] * get<V>(state + (i + 1) * width + n * step);
      }
    }
    if (i < dim) {
      for (int n = 0; n < N; ++n) told[0][n] += key[i] * get<V>(state + i * width + n * step);
    }
    V write[N];
    for (int n = 0; n < N; ++n) {
      write[n] = (get<V>(value + n * step) - (told[0][n] + told[1][n]) * (decay * key_norm)) * (beta * key_norm);
    }

    V read[2][N] = {};
    const auto renew = [&](int64_t row, V* sums) {
      for (int n = 0; n < N; ++n) {
        const V updated = get<V>(state + row * width + n * step) * decay + key[row] * write[n];
        put(state + row * width + n * step, updated);
        sums[n] += query[row] * updated;
      }
    };
    for (i = 0; i + 2 <= dim; i += 2) {
      renew(i, read[0]);
      renew(i + 1, read[1]);
    }
    if (i < dim) renew(i, read[0]);
    for (int n = 0; n < N; ++n) {
      put(head.out + token * head.out_stride + n * step, (read[0][n] + read[1][n]) * query_norm);
    }
  }
}

void run_columns(Head head, float* state, int64_t width, int64_t count) {
  int64_t done = 0;
  const auto advance = [&](int64_t by) {
    done += by;
    head.value += by;
    head.out += by;
  };
  if (count == kChannels) {
    columns<vec, 4>(head, state, width);
    return;
  }
  for (; count - done >= kLanes; advance(kLanes)) columns<vec, 1>(head, state + done, width);
  for (; done < count; advance(1)) columns<float, 1>(head, state + done, width);
}

}  // namespace

extern "C" {

// out [batch, length, channels] = silu of the convolution of x with weight [channels, taps]; rows of x are `stride` floats
// apart. past [batch, taps - 1, channels] holds the rows before x and then the last rows; null: zeros.
void mfx_causal_conv(const float* x, int64_t stride, const float* weight, float* past, float* out, int64_t batch,
                     int64_t length, int64_t channels, int64_t taps) {
  const int64_t before = taps - 1, blocks = (channels + kBlock - 1) / kBlock;
  parallel(batch * blocks, length * kBlock * taps, [=](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t row = item / blocks, first = item % blocks * kBlock;
      const int64_t last = std::min(first + kBlock, channels);
      const auto input = [&](int64_t token) -> const float* {
        if (token >= 0) return x + (row * length + token) * stride;
        return past ? past + (row * before + before + token) * channels : nullptr;
      };
      convolve(x + row * length * stride, stride, past ? past + row * before * channels : nullptr, weight,
               out + row * length * channels, length, channels, taps, first, last);
      if (!past) continue;
      for (int64_t slot = 0; slot < before; ++slot) {  // ascending: what is read is not yet overwritten
        const float* values = input(length - before + slot);
        std::copy(values + first, values + last, past + (row * before + slot) * channels + first);
      }
    }
  }, length == 1);
}

// out [batch, length, heads * dim] of the gated delta rule. qkv [batch, length, 2 key_heads * key_dim + heads * dim], beta
// and g [batch, length, heads]; state [batch, heads, key_dim, dim] is updated.
void mfx_gated_delta_rule(const float* qkv, const float* beta, const float* g, float* state, float* out, int64_t batch,
                          int64_t length, int64_t key_heads, int64_t key_dim, int64_t heads, int64_t dim) {
  const int64_t stride = 2 * key_heads * key_dim + heads * dim, blocks = (dim + kChannels - 1) / kChannels;
  parallel(batch * heads * blocks, 8 * length * key_dim * std::min(kChannels, dim), [=](int64_t begin, int64_t end) {
    float local[kLocal];
    for (int64_t item = begin; item < end; ++item) {
      const int64_t row = item / (heads * blocks), number = item / blocks % heads, first = item % blocks * kChannels;
      const int64_t key_head = number / (heads / key_heads), count = std::min(kChannels, dim - first);
      const float* tokens = qkv + row * length * stride;
      const float* query = tokens + key_head * key_dim;
      const float* value = tokens + 2 * key_heads * key_dim + number * dim + first;
      const int64_t gate = row * length * heads + number;
      const Head head{query, query + key_heads * key_dim, value, beta + gate, g + gate, stride, heads, heads * dim,
                      out + (row * length * heads + number) * dim + first, length, key_dim};
      float* own = state + (row * heads + number) * key_dim * dim + first;
      if (length == 1 || key_dim * count > kLocal) {
        run_columns(head, own, dim, count);
        continue;
      }
      for (int64_t i = 0; i < key_dim; ++i) std::copy_n(own + i * dim, count, local + i * count);
      run_columns(head, local, count, count);
      for (int64_t i = 0; i < key_dim; ++i) std::copy_n(local + i * count, count, own + i * dim);
    }
  }, length == 1);
}

// out [rows, heads * dim] = rms_norm(x) * weight [dim] * silu(gate), the norm over each head; rows of the gate are
// `stride` floats apart.
void mfx_gated_rms_norm(const float* x, const float* gate, int64_t stride, const float* weight, float* out, int64_t rows,
                        int64_t heads, int64_t dim, float eps) {
  parallel(rows * heads, 4 * dim, [=](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const float *from = x + item * dim, *gates = gate + item / heads * stride + item % heads * dim;
      const float factor = inverse_rms(from, dim, eps);
      for (int64_t i = 0; i < dim; i += kLanes) {
        const int64_t count = std::min<int64_t>(kLanes, dim - i);
        if (count == kLanes) {
          store(out + item * dim + i, load(from + i) * factor * load(weight + i) * silu(load(gates + i)));
        } else {
          const vec normed = load_part(from + i, count, 0) * factor * load_part(weight + i, count, 0);
          store_part(out + item * dim + i, normed * silu(load_part(gates + i, count, 0)), count);
        }
      }
    }
  });
}

}  // extern "C"
