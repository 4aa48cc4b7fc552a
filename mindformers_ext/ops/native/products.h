// Products with packed weights, which the kernels share.
//
// A matrix w [rows, depth] lies in panels of kPanel rows, each [depth, kPanel], so that neighbouring outputs are lanes of
// one register. Every output is one accumulator that runs over the depth in order with multiply-adds, fused where the
// processor can: how many rows of x are worked off together, and in which blocks, changes no bit of it.

#pragma once

#include "common.h"

namespace mfx {

constexpr int kPanel = 2 * kLanes;

// How the elements of a matrix are stored.
enum Kind : int32_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2 };

// Which row of the matrix a lane of a panel holds.
enum Order : int32_t {
  kPlain = 0,      // row panel * kPanel + lane
  kAlternate = 1,  // rows 2 u and 2 u + 1, gate and up of unit u, in the same lane of the two registers
  kBeside = 2,     // rows u and rows / 2 + u likewise
};

// Python builds the same structure: see PackedWeight.
struct Matrix {
  const void* panels;
  const float* scale;  // [panels * kPanel], in the order of the lanes; null but for int8
  const float* bias;   // the same; may be null
  int64_t rows, depth;
  int32_t kind, order;
};

inline int64_t num_panels(const Matrix& w) {
  const int64_t lanes = w.order == kPlain ? kPanel : kLanes, count = w.order == kPlain ? w.rows : w.rows / 2;
  return (count + lanes - 1) / lanes;
}

// Columns of the product: pairs of gate and up become one.
inline int64_t num_outputs(const Matrix& w) { return w.order == kPlain ? w.rows : w.rows / 2; }

// out [m, num_outputs] = x [m, depth] w^T * scale + bias, or silu(gate) * up of that, gates bounded from above and ups on
// both sides; scratch [m, depth].
void product(const Matrix& w, const float* x, float* out, int64_t m, float* scratch, float bound);

}  // namespace mfx
