// Attention with sinks over keys that are their own values, scores of the lightning indexer, rotary positions on the last
// channels of a head.

#include <cmath>

#include "common.h"

namespace {

using namespace mfx;

// Turns `count` scores into softmax weights beside a sink that takes its part.
inline void softmax_with_sink(float* scores, int64_t count, float sink) {
  float top = sink;
  for (int64_t i = 0; i < count; ++i) top = std::max(top, scores[i]);
  vec totals = {};
  int64_t at = 0;
  for (; at + kLanes <= count; at += kLanes) {
    const vec value = exp(load(scores + at) - top);
    store(scores + at, value);
    totals += value;
  }
  if (at < count) {
    const vec value = exp(load_part(scores + at, count - at, -__builtin_inff()) - top);
    store_part(scores + at, value, count - at);
    totals += value;
  }
  const float inverse = 1 / (sum(totals) + std::exp(sink - top));
  for (int64_t i = 0; i < count; ++i) scores[i] *= inverse;
}

// The keys that one token sees: `index` below `slots` is a key of the window, above it a block.
struct Keys {
  const float *window, *blocks;
  const int32_t* index;
  const float* bias;
  int64_t count, slots, dim;

  const float* at(int64_t i) const {
    return index[i] < slots ? window + index[i] * dim : blocks + (index[i] - slots) * dim;
  }
};

// M heads of one token; scores [M, count] is scratch.
template <int M>
inline void attend(const float* query, const Keys& keys, const float* sinks, float scale, float* scores, float* out) {
  const int64_t dim = keys.dim, count = keys.count;
  for (int64_t i = 0; i < count; ++i) {
    float products[M];
    dot_block<M, 1>(query, keys.at(i), nullptr, products, 1, dim);
    for (int head = 0; head < M; ++head) scores[head * count + i] = products[head] * scale + keys.bias[i];
  }
  for (int head = 0; head < M; ++head) softmax_with_sink(scores + head * count, count, sinks[head]);
  std::fill_n(out, M * dim, 0.0f);
  for (int64_t i = 0; i < count; ++i) {
    const float* key = keys.at(i);
    for (int head = 0; head < M; ++head) {
      const float weight = scores[head * count + i];
      for (int64_t j = 0; j < dim; ++j) out[head * dim + j] += weight * key[j];
    }
  }
}

constexpr int kHeads = 4;     // heads that share what is read of the keys
constexpr int64_t kKeys = 4;  // keys that share what is read of the heads

// The indexer's scores of R keys for one token.
template <int R>
inline void score_keys(const float* query, const float* keys, const float* weights, int64_t heads, int64_t dim, float* scores) {
  float totals[R] = {};
  int64_t head = 0;
  for (; head + kHeads <= heads; head += kHeads) {
    float products[kHeads * R];
    dot_block<kHeads, R>(query + head * dim, keys, nullptr, products, R, dim);
    for (int i = 0; i < kHeads; ++i) {
      for (int j = 0; j < R; ++j) totals[j] += weights[head + i] * std::max(products[i * R + j], 0.0f);
    }
  }
  for (; head < heads; ++head) {
    float products[R];
    dot_block<1, R>(query + head * dim, keys, nullptr, products, R, dim);
    for (int j = 0; j < R; ++j) totals[j] += weights[head] * std::max(products[j], 0.0f);
  }
  std::copy_n(totals, R, scores);
}

}  // namespace

extern "C" {

// x, out [tokens, heads, dim]: RMS norm (unless `norm` is 0; weight may be null), then the last `size` channels turn in
// pairs of neighbours; cos and sin [tokens, size], of which the first half counts; `direction` is 1 or -1.
void mfx_partial_rotary(const float* x, const float* weight, const float* cos, const float* sin, float* out, int64_t tokens,
                        int64_t heads, int64_t dim, int64_t size, int64_t norm, float eps, float direction) {
  parallel(tokens * heads, 4 * dim, [=](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const float *from = x + item * dim, *c = cos + item / heads * size, *s = sin + item / heads * size;
      float* to = out + item * dim;
      const float factor = norm ? inverse_rms(from, dim, eps) : 1;
      for (int64_t i = 0; i < dim; ++i) to[i] = weight ? from[i] * factor * weight[i] : from[i] * factor;
      float* tail = to + dim - size;
      for (int64_t i = 0; i < size / 2; ++i) {
        const float even = tail[2 * i], odd = tail[2 * i + 1], sine = direction * s[i];
        tail[2 * i] = even * c[i] - odd * sine;
        tail[2 * i + 1] = odd * c[i] + even * sine;
      }
    }
  });
}

// query, out [batch, length, heads, dim]; keys [batch, slots, dim] with bias [bias_batch, length, slots]; blocks [batch,
// capacity, dim], the first `count` of which have block_bias [block_batch, length, count]. Scratch: index and biases
// [batch * length, slots + count], scores [batch * length, heads, slots + count]. What is masked is not read.
void mfx_sink_attention(const float* query, const float* keys, const float* bias, const float* sinks, const float* blocks,
                        const float* block_bias, float* out, int32_t* index, float* biases, float* scores, int64_t batch,
                        int64_t length, int64_t heads, int64_t dim, int64_t slots, int64_t capacity, int64_t count,
                        int64_t bias_batch, int64_t block_batch, float scale) {
  const int64_t width = slots + count, groups = (heads + kHeads - 1) / kHeads;
  int64_t longest = 1;
  for (int64_t token = 0; token < batch * length; ++token) {
    const float* first = bias + (bias_batch == 1 ? token % length : token) * slots;
    const float* second = block_bias + (block_batch == 1 ? token % length : token) * count;
    int64_t seen = 0;
    for (int64_t i = 0; i < width; ++i) {
      const float value = i < slots ? first[i] : second[i - slots];
      if (value < -1e37f) continue;
      index[token * width + seen] = static_cast<int32_t>(i);
      biases[token * width + seen++] = value;
    }
    if (seen < width) index[token * width + seen] = -1;
    longest = std::max(longest, seen);
  }
  parallel(batch * length * groups, 4 * kHeads * dim * longest, [=](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t token = item / groups, head = item % groups * kHeads, row = token / length;
      const int32_t* seen = index + token * width;
      const int64_t used = std::find(seen, seen + width, -1) - seen;
      const Keys visible{keys + row * slots * dim, blocks + row * capacity * dim, seen, biases + token * width, used, slots, dim};
      const int64_t at = (token * heads + head) * dim;
      float* scratch = scores + (token * heads + head) * width;
      switch (std::min<int64_t>(kHeads, heads - head)) {
        case 4: attend<4>(query + at, visible, sinks + head, scale, scratch, out + at); break;
        case 3: attend<3>(query + at, visible, sinks + head, scale, scratch, out + at); break;
        case 2: attend<2>(query + at, visible, sinks + head, scale, scratch, out + at); break;
        default: attend<1>(query + at, visible, sinks + head, scale, scratch, out + at);
      }
    }
  }, true);
}

// out [batch, length, count] = sum over heads of weights [batch, length, heads] times relu(query [batch, length, heads,
// dim] . keys [batch, capacity, dim]).
void mfx_index_scores(const float* query, const float* keys, const float* weights, float* out, int64_t batch, int64_t length,
                      int64_t heads, int64_t dim, int64_t capacity, int64_t count) {
  const int64_t groups = (count + kKeys - 1) / kKeys;
  parallel(batch * length * groups, 2 * kKeys * heads * dim, [=](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t token = item / groups, first = item % groups * kKeys, left = std::min(kKeys, count - first);
      const float *q = query + token * heads * dim, *w = weights + token * heads;
      const float* key = keys + (token / length * capacity + first) * dim;
      float* scores = out + token * count + first;
      if (left == kKeys) {
        score_keys<kKeys>(q, key, w, heads, dim, scores);
      } else {
        for (int64_t i = 0; i < left; ++i) score_keys<1>(q, key + i * dim, w, heads, dim, scores + i);
      }
    }
  });
}

}  // extern "C"
