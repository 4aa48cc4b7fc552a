// The products of a mixture of experts: every expert's tokens through its two matrices, weighted and summed.

#include "common.h"

namespace {

using namespace mfx;

constexpr int kWide = kLanes == 16 ? 4 : 2;  // vectors in a row of the register tile
constexpr int kTile = kWide * kLanes;

// out[m][j] = sum_k rows[m][k] w[k][j] for `width` columns j of w, whose rows are `stride` apart: a register tile.
template <int M>
inline void tile(const float* const* rows, const float* w, int64_t stride, int64_t size, float* const* out,
                 int64_t width) {
  for (int64_t j = 0; j < width; j += kTile) {
    if (width - j >= kTile) {
      vec acc[M][kWide] = {};
      for (int64_t k = 0; k < size; ++k) {
        vec weights[kWide];
        for (int v = 0; v < kWide; ++v) weights[v] = load(w + k * stride + j + v * kLanes);
        for (int m = 0; m < M; ++m) {
          for (int v = 0; v < kWide; ++v) acc[m][v] += weights[v] * rows[m][k];
        }
      }
      for (int m = 0; m < M; ++m) {
        for (int v = 0; v < kWide; ++v) store(out[m] + j + v * kLanes, acc[m][v]);
      }
    } else {
      for (int m = 0; m < M; ++m) {
        for (int64_t i = j; i < width; ++i) {
          float acc = 0;
          for (int64_t k = 0; k < size; ++k) acc = __builtin_fmaf(w[k * stride + i], rows[m][k], acc);
          out[m][i] = acc;
        }
      }
    }
  }
}

// The same for one row, whose columns stay in the cache while the rows of w stream by.
inline void stream(const float* row, const float* w, int64_t stride, int64_t size, float* out, int64_t width) {
  std::fill(out, out + width, 0.0f);
  for (int64_t k = 0; k < size; ++k) {
    const float factor = row[k];
    const float* weights = w + k * stride;
    int64_t j = 0;
    for (; j + kLanes <= width; j += kLanes) store(out + j, load(out + j) + load(weights + j) * factor);
    for (; j < width; ++j) out[j] = __builtin_fmaf(weights[j], factor, out[j]);
  }
}

// Products of `count` rows with the columns [begin, begin + width) of w. Every element is summed over k in order,
// whatever the number of rows, so that a token's result does not depend on its neighbours.
inline void product(const float* const* rows, int64_t count, const float* w, int64_t stride, int64_t size,
                    float* const* out, int64_t width) {
  int64_t at = 0;
  if (count <= 2) {
    for (; at < count; ++at) stream(rows[at], w, stride, size, out[at], width);
    return;
  }
  // A tile of columns at a time: its part of w stays in the cache for all rows.
  for (int64_t j = 0; j < width; j += kTile) {
    const int64_t part = std::min<int64_t>(kTile, width - j);
    for (at = 0; at < count; at += 4) {
      float* targets[4];
      const int64_t few = std::min<int64_t>(4, count - at);
      for (int64_t m = 0; m < few; ++m) targets[m] = out[at + m] + j;
      if (few == 4) tile<4>(rows + at, w + j, stride, size, targets, part);
      if (few == 3) tile<3>(rows + at, w + j, stride, size, targets, part);
      if (few == 2) tile<2>(rows + at, w + j, stride, size, targets, part);
      if (few == 1) tile<1>(rows + at, w + j, stride, size, targets, part);
    }
  }
}

}  // namespace

extern "C" {

// out [., hidden] = sum over the pairs (row, expert) of factor * (silu(x gate) * (x up)) down, where weight1
// [experts, hidden, 2 ffn] holds gate beside up and weight2 [experts, ffn, hidden] down. Pairs are sorted by expert;
// those of expert e are starts[e] to starts[e + 1]. scratch is [2 ffn + hidden, pairs] floats; out starts at 0.
void mfx_experts(const float* x, const float* weight1, const float* weight2, const int32_t* pair_rows,
                 const float* pair_factors, const int64_t* starts, float* scratch, float* out, int64_t hidden,
                 int64_t ffn, int64_t experts, int64_t pairs, float limit) {
  const float bound = limit > 0 ? limit : std::numeric_limits<float>::infinity();
  float* const gates = scratch;
  float* const ups = gates + pairs * ffn;
  float* const mixed = ups + pairs * ffn;
  const int64_t blocks = (ffn + kTile - 1) / kTile, hidden_blocks = (hidden + kTile - 1) / kTile;
  parallel(blocks, 4 * pairs * hidden * kTile, [=](int64_t first, int64_t last) {
    const int64_t begin = first * kTile, width = std::min(last * kTile, ffn) - begin;
    for (int64_t e = 0; e < experts; ++e) {
      const float* w = weight1 + e * hidden * 2 * ffn + begin;
      for (int64_t at = starts[e]; at < starts[e + 1]; at += 256) {
        const int64_t count = std::min<int64_t>(256, starts[e + 1] - at);
        const float* sources[256];
        float *gate[256], *up[256];
        for (int64_t i = 0; i < count; ++i) {
          sources[i] = x + pair_rows[at + i] * hidden;
          gate[i] = gates + (at + i) * ffn + begin;
          up[i] = ups + (at + i) * ffn + begin;
        }
        product(sources, count, w, 2 * ffn, hidden, gate, width);
        product(sources, count, w + ffn, 2 * ffn, hidden, up, width);
        for (int64_t i = 0; i < count; ++i) {
          for (int64_t j = 0; j < width; j += kLanes) {
            const int64_t part = std::min<int64_t>(kLanes, width - j);
            if (part == kLanes) {
              store(gate[i] + j, clamped_swiglu(load(gate[i] + j), load(up[i] + j), bound));
            } else {
              const vec result = clamped_swiglu(load_part(gate[i] + j, part, 0), load_part(up[i] + j, part, 0), bound);
              store_part(gate[i] + j, result, part);
            }
          }
        }
      }
    }
  }, true);
  parallel(hidden_blocks, 2 * pairs * ffn * kTile, [=](int64_t first, int64_t last) {
    const int64_t begin = first * kTile, width = std::min(last * kTile, hidden) - begin;
    for (int64_t e = 0; e < experts; ++e) {
      const float* w = weight2 + e * ffn * hidden + begin;
      for (int64_t at = starts[e]; at < starts[e + 1]; at += 256) {
        const int64_t count = std::min<int64_t>(256, starts[e + 1] - at);
        const float* sources[256];
        float* targets[256];
        for (int64_t i = 0; i < count; ++i) {
          sources[i] = gates + (at + i) * ffn;
          targets[i] = mixed + (at + i) * hidden + begin;
        }
        product(sources, count, w, hidden, ffn, targets, width);
        for (int64_t i = 0; i < count; ++i) {
          float* sum = out + pair_rows[at + i] * hidden + begin;
          for (int64_t j = 0; j < width; ++j) sum[j] += pair_factors[at + i] * targets[i][j];
        }
      }
    }
  });
}

}  // extern "C"
