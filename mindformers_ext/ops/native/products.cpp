// Products of float32 rows with weights of 32, 16 or 8 bits that lie in panels; see products.h.

#include "products.h"

namespace {

using namespace mfx;

// Most rows of x in one register tile, whose accumulators are two registers a row; and how many of them are read where
// they are, while more are brought into the order in which tiles read them.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTileRows = 12, kDirectRows = 8;
#else
constexpr int kTileRows = 6, kDirectRows = 4;
#endif
// A block of a panel and the rows of x beside it stay in the first cache.
constexpr int64_t kBlockDepth = kLanes == 16 ? 128 : 256;
// Rows of x whose accumulators are kept at a time.
constexpr int64_t kBlockRows = 240;

struct Pair {
  vec first, second;
};

inline Pair widen(const float* p) { return {load(p), load(p + kLanes)}; }

// The halves of a 32-bit word belong to the same lane of the two registers.
inline Pair widen(const uint16_t* p) {
  const uvec words = *reinterpret_cast<const uvec*>(p);
  const uvec low = words << 16, high = words & 0xffff0000u;
  return {reinterpret_cast<const vec&>(low), reinterpret_cast<const vec&>(high)};
}

inline vec widen_bytes(const int8_t* p) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  vec values;
  for (int i = 0; i < kLanes; ++i) values[i] = p[i];
  return values;
#endif
}
inline Pair widen(const int8_t* p) { return {widen_bytes(p), widen_bytes(p + kLanes)}; }

// Lane of a stored row of a panel: 16-bit elements of both registers alternate.
template <class W>
inline int64_t place(int64_t lane) {
  if (sizeof(W) != 2) return lane;
  return lane < kLanes ? 2 * lane : 2 * (lane - kLanes) + 1;
}

// Adds a block of a product to acc [R][M][kPanel]: M rows of x with R panels that are `panel_size` elements apart. Rows
// lie `stride` apart, or, packed, side by side: x [depth][M]. kOnce: no other tile
// reads these weights, so memory is what they wait for.
template <int M, int R, bool kPacked, bool kOnce, class W>
inline void tile(const float* x, int64_t stride, const W* w, int64_t panel_size, int64_t depth, float* acc,
                 bool resume) {
  vec first[R][M], second[R][M];
  for (int r = 0; r < R; ++r) {
    for (int i = 0; i < M; ++i) {
      first[r][i] = resume ? load(acc + (r * M + i) * kPanel) : vec{};
      second[r][i] = resume ? load(acc + (r * M + i) * kPanel + kLanes) : vec{};
    }
  }
  for (int64_t at = 0; at < depth; ++at) {
    for (int r = 0; r < R; ++r) {
      const W* from = w + r * panel_size + at * kPanel;
      fetch_ahead(from, kPanel);
      if (kOnce && R == 1) fetch_next_pages(from, kPanel);
      const Pair weights = widen(from);
      for (int i = 0; i < M; ++i) {
        const vec value = spread(kPacked ? x[at * M + i] : x[i * stride + at]);
        first[r][i] = multiply_add(value, weights.first, first[r][i]);
        second[r][i] = multiply_add(value, weights.second, second[r][i]);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int i = 0; i < M; ++i) {
      store(acc + (r * M + i) * kPanel, first[r][i]);
      store(acc + (r * M + i) * kPanel + kLanes, second[r][i]);
    }
  }
}

// Turns the accumulators of a panel of one row into outputs. Not inlined: compiled once, it rounds in one way.
__attribute__((noinline)) void finish(const Matrix& w, int64_t panel, const float* acc, float* out, float bound) {
  vec first = load(acc), second = load(acc + kLanes);
  const int64_t at = panel * kPanel;
  if (w.scale) {
    first = first * load(w.scale + at);
    second = second * load(w.scale + at + kLanes);
  }
  if (w.bias) {
    first = first + load(w.bias + at);
    second = second + load(w.bias + at + kLanes);
  }
  if (w.order == kPlain) {
    const int64_t left = w.rows - at;
    if (left >= kPanel) {
      store(out + at, first);
      store(out + at + kLanes, second);
    } else {
      store_part(out + at, first, std::min<int64_t>(left, kLanes));
      if (left > kLanes) store_part(out + at + kLanes, second, left - kLanes);
    }
    return;
  }
  const vec result = clamped_swiglu(first, second, bound);
  const int64_t left = w.rows / 2 - panel * kLanes;
  if (left >= kLanes) {
    store(out + panel * kLanes, result);
  } else {
    store_part(out + panel * kLanes, result, left);
  }
}

// M rows of x, read where they are, with the panels [begin, end), R at once: enough to hide the latency of the multiply-adds
// and to ask memory for several places at a time.
template <int M, class W, int R = std::max(1, std::min(kTileRows / 2, kTileRows / M))>
void stream(const Matrix& w, const float* x, float* out, int64_t begin, int64_t end, float bound) {
  const int64_t size = w.depth * kPanel, outputs = num_outputs(w);
  const W* panels = static_cast<const W*>(w.panels);
  float acc[R * M * kPanel];
  int64_t panel = begin;
  for (; panel + R <= end; panel += R) {
    tile<M, R, false, true>(x, w.depth, panels + panel * size, size, w.depth, acc, false);
    for (int r = 0; r < R; ++r) {
      for (int i = 0; i < M; ++i) finish(w, panel + r, acc + (r * M + i) * kPanel, out + i * outputs, bound);
    }
  }
  if constexpr (R > 1) stream<M, W, R / 2>(w, x, out, panel, end, bound);
}

template <class W, int M = kDirectRows>
void few_rows(const Matrix& w, const float* x, float* out, int64_t m, int64_t begin, int64_t end, float bound) {
  if constexpr (M > 0) {
    if (m == M) return stream<M, W>(w, x, out, begin, end, bound);
    few_rows<W, M - 1>(w, x, out, m, begin, end, bound);
  }
}

// Rows of x in tiles of about equal size: tile t of [first_row(t), first_row(t + 1)).
struct Tiles {
  int64_t rows, count;
  explicit Tiles(int64_t m) : rows(m), count((m + kTileRows - 1) / kTileRows) {}
  int64_t first_row(int64_t t) const { return rows * t / count; }
};

// Brings the rows of all tiles into the order [tile][depth][rows of the tile].
void pack_rows(const float* x, float* packed, const Tiles& tiles, int64_t depth) {
  const int64_t parts = (depth + kBlockDepth - 1) / kBlockDepth;
  parallel(tiles.count * parts, 2 * kTileRows * kBlockDepth, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t t = item / parts, from = item % parts * kBlockDepth, to = std::min(from + kBlockDepth, depth);
      const int64_t first = tiles.first_row(t), count = tiles.first_row(t + 1) - first;
      for (int64_t i = 0; i < count; ++i) {
        const float* row = x + (first + i) * depth;
        float* place = packed + first * depth + i;
        for (int64_t at = from; at < to; ++at) place[at * count] = row[at];
      }
    }
  }, true);
}

template <bool kOnce, class W, int M = kTileRows>
inline void packed_tile(int64_t rows, const float* x, const W* w, int64_t depth, float* acc, bool resume) {
  if constexpr (M > 0) {
    if (rows == M) return tile<M, 1, true, kOnce>(x, 0, w, 0, depth, acc, resume);
    packed_tile<kOnce, W, M - 1>(rows, x, w, depth, acc, resume);
  }
}

// Packed rows with the panels [begin, end).
template <class W>
void many_rows(const Matrix& w, const float* packed, float* out, const Tiles& tiles, int64_t begin, int64_t end,
               float bound) {
  const int64_t size = w.depth * kPanel, outputs = num_outputs(w);
  const W* panels = static_cast<const W*>(w.panels);
  alignas(64) float acc[kBlockRows * kPanel];
  const int64_t group = kBlockRows / kTileRows;  // tiles at a time
  const int64_t block_depth = tiles.count == 1 ? w.depth : kBlockDepth;
  for (int64_t t0 = 0; t0 < tiles.count; t0 += group) {
    const int64_t t1 = std::min(t0 + group, tiles.count), base = tiles.first_row(t0);
    for (int64_t panel = begin; panel < end; ++panel) {
      for (int64_t at = 0; at < w.depth; at += block_depth) {
        const int64_t part = std::min(block_depth, w.depth - at);
        const W* block = panels + panel * size + at * kPanel;
        for (int64_t t = t0; t < t1; ++t) {
          const int64_t first = tiles.first_row(t), rows = tiles.first_row(t + 1) - first;
          const float* x = packed + first * w.depth + at * rows;
          float* to = acc + (first - base) * kPanel;
          if (tiles.count == 1) {
            packed_tile<true>(rows, x, block, part, to, false);
          } else {
            packed_tile<false>(rows, x, block, part, to, at > 0);
          }
        }
      }
      for (int64_t i = base; i < tiles.first_row(t1); ++i) {
        finish(w, panel, acc + (i - base) * kPanel, out + i * outputs, bound);
      }
    }
  }
}

template <class W>
void product_of(const Matrix& w, const float* x, float* out, int64_t m, float* scratch, float bound) {
  if (m <= kDirectRows) {
    parallel(num_panels(w), m * w.depth * kPanel, [&](int64_t begin, int64_t end) {
      few_rows<W>(w, x, out, m, begin, end, bound);
    }, true);
    return;
  }
  const Tiles tiles(m);
  pack_rows(x, scratch, tiles, w.depth);
  parallel(num_panels(w), m * w.depth * kPanel, [&](int64_t begin, int64_t end) {
    many_rows<W>(w, scratch, out, tiles, begin, end, bound);
  }, true);
}

// The row of the matrix in a lane of a panel; not below the number of rows: none.
inline int64_t row_of(const Matrix& w, int64_t panel, int64_t lane) {
  if (w.order == kPlain) return panel * kPanel + lane;
  const int64_t unit = panel * kLanes + lane % kLanes, second = lane / kLanes;
  if (unit >= w.rows / 2) return w.rows;
  return w.order == kAlternate ? 2 * unit + second : second * (w.rows / 2) + unit;
}

// The place of a row: panel * kPanel + lane.
inline int64_t lane_of(const Matrix& w, int64_t row) {
  if (w.order == kPlain) return row;
  const int64_t half = w.rows / 2;
  const int64_t unit = w.order == kAlternate ? row / 2 : row % half, second = w.order == kAlternate ? row % 2 : row / half;
  return unit / kLanes * kPanel + unit % kLanes + second * kLanes;
}

inline float as_float(float value) { return value; }
inline float as_float(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  __builtin_memcpy(&value, &word, sizeof value);
  return value;
}

inline float absolute(float value) { return value < 0 ? -value : value; }

inline void narrow(float value, float, float* to) { *to = value; }
// To the nearest, ties to even; nan stays nan.
inline void narrow(float value, float, uint16_t* to) {
  uint32_t word;
  __builtin_memcpy(&word, &value, sizeof word);
  const bool is_nan = (word & 0x7fffffffu) > 0x7f800000u;
  *to = is_nan ? (word >> 16) | 64 : (word + 0x7fff + ((word >> 16) & 1)) >> 16;
}
// A row of nothing but zeros or subnormal numbers has a scale that does not keep its values within 127.
inline void narrow(float value, float scale, int8_t* to) {
  const float whole = scale > 0 ? __builtin_rintf(value / scale) : 0;
  *to = static_cast<int8_t>(std::max(-127.0f, std::min(127.0f, whole)));
}

// Largest magnitude of a row over 127; nan if a value is none or infinite.
template <class S>
float scale_of(const S* row, int64_t depth, int64_t step) {
  float top = 0, check = 0;
  for (int64_t at = 0; at < depth; ++at) {
    const float value = as_float(row[at * step]);
    top = std::max(top, absolute(value));
    check += value * 0;
  }
  return check == 0 ? top / 127 : check;
}

// Fills the panels of w and, for int8, its scales from source values that lie row_step and step apart.
template <class S, class W>
void pack(const Matrix& w, const S* source, int64_t row_step, int64_t step, W* panels, float* scale) {
  constexpr int64_t kPart = 64;
  parallel(num_panels(w), w.depth * kPanel, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      float scales[kPanel] = {};
      const S* rows[kPanel];
      for (int64_t lane = 0; lane < kPanel; ++lane) {
        const int64_t row = row_of(w, panel, lane);
        rows[lane] = row < w.rows ? source + row * row_step : nullptr;
        if (scale) scale[panel * kPanel + lane] = scales[lane] = rows[lane] ? scale_of(rows[lane], w.depth, step) : 0;
      }
      for (int64_t from = 0; from < w.depth; from += kPart) {
        W* to = panels + (panel * w.depth + from) * kPanel;
        const int64_t part = std::min(kPart, w.depth - from);
        for (int64_t lane = 0; lane < kPanel; ++lane) {
          const S* row = rows[lane];
          W* column = to + place<W>(lane);
          for (int64_t at = 0; at < part; ++at) {
            narrow(row ? as_float(row[(from + at) * step]) : 0, scales[lane], column + at * kPanel);
          }
        }
      }
    }
  });
}

template <class S>
void pack_as(const Matrix& w, const S* source, int64_t row_step, int64_t step, void* panels, float* scale) {
  if (w.kind == kFloat32) pack(w, source, row_step, step, static_cast<float*>(panels), nullptr);
  if (w.kind == kBfloat16) pack(w, source, row_step, step, static_cast<uint16_t*>(panels), nullptr);
  if (w.kind == kInt8) pack(w, source, row_step, step, static_cast<int8_t*>(panels), scale);
}

template <class W>
void read_row(const Matrix& w, int64_t row, float* out) {
  const int64_t at = lane_of(w, row), panel = at / kPanel, lane = at % kPanel;
  const W* from = static_cast<const W*>(w.panels) + panel * w.depth * kPanel + place<W>(lane);
  const float scale = w.scale ? w.scale[at] : 1;
  for (int64_t i = 0; i < w.depth; ++i) {
    if constexpr (sizeof(W) == 1) {
      out[i] = from[i * kPanel] * scale;
    } else {
      out[i] = as_float(from[i * kPanel]);
    }
  }
}

}  // namespace

namespace mfx {

void product(const Matrix& w, const float* x, float* out, int64_t m, float* scratch, float bound) {
  if (m < 1) return;
  if (w.kind == kFloat32) product_of<float>(w, x, out, m, scratch, bound);
  if (w.kind == kBfloat16) product_of<uint16_t>(w, x, out, m, scratch, bound);
  if (w.kind == kInt8) product_of<int8_t>(w, x, out, m, scratch, bound);
}

}  // namespace mfx

extern "C" {

// Rows of a matrix in one panel.
int64_t mfx_panel_rows() { return kPanel; }

// Fills the panels (and scales) of w from float32 values, or from bfloat16 bits; element (row, at) lies at
// source[row * row_step + at * step].
void mfx_pack(const Matrix* w, const void* source, int32_t is_bfloat16, int64_t row_step, int64_t step, void* panels,
              float* scale) {
  if (is_bfloat16) {
    pack_as(*w, static_cast<const uint16_t*>(source), row_step, step, panels, scale);
  } else {
    pack_as(*w, static_cast<const float*>(source), row_step, step, panels, scale);
  }
}

// See product(); limit 0 for no bound. scratch [m, depth].
void mfx_product(const Matrix* w, const float* x, float* out, int64_t m, float* scratch, float limit) {
  product(*w, x, out, m, scratch, limit > 0 ? limit : std::numeric_limits<float>::infinity());
}

// out [count, depth]: rows of w, widened.
void mfx_packed_rows(const Matrix* w, const int32_t* ids, int64_t count, float* out) {
  parallel(count, 8 * w->depth, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (w->kind == kFloat32) read_row<float>(*w, ids[i], out + i * w->depth);
      if (w->kind == kBfloat16) read_row<uint16_t>(*w, ids[i], out + i * w->depth);
      if (w->kind == kInt8) read_row<int8_t>(*w, ids[i], out + i * w->depth);
    }
  });
}

}  // extern "C"
