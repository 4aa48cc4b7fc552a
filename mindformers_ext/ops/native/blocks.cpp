// Decoder layers with packed weights: their two halves in one call each, grouped-query attention from the normalised rows to
// the projection back and the gated MLP, and all layers of a dense model in one.

#include "products.h"

namespace mfx {

// Python builds the same structure: see AttentionBlock.
struct AttentionBlock {
  const Matrix *qkv, *proj;
  const float *query_norm, *key_norm;  // [dim]; null without norms
  int64_t groups, heads, stored, dim, rotary_dim;  // a group's heads in qkv: queries, gates if any, a key, a value
  float eps, scale;
};

// A dense decoder layer; see DenseLayers.
struct DenseLayer {
  const float *input_norm, *mlp_norm;  // [hidden]
  const AttentionBlock* attention;
  const Matrix *fc1, *fc2;
};

}  // namespace mfx

extern "C" {
void mfx_rms_norm(const float* x, const float* weight, float* out, int64_t rows, int64_t dim, float eps);
void mfx_add_rms_norm(const float* x, const float* update, const float* weight, float* total, float* out, int64_t rows,
                      int64_t dim, float eps);
}

namespace {

using namespace mfx;

// Rows of queries that share the reading of keys and values.
constexpr int kQueryRows = 4;

// Slots that a row of queries may see: [begin, end).
struct Seen {
  int64_t begin, end;
};

// Not inlined: compiled once, it rounds in one way.
__attribute__((noinline)) void weights_of(float* scores, const float* bias, float scale, int64_t slots) {
  softmax(scores, bias, scale, scores, slots);
}

// out[i] [dim] = sum over the slots [begin, end) of weights[i][slot] values[slot], for M rows, slot by slot; from the
// element `at` on, W registers at once.
template <int M, int W = (M <= 2 ? 4 : 2) * (kLanes == 16 ? 2 : 1)>
void mix(const float* weights, int64_t stride, const float* values, int64_t begin, int64_t end, int64_t dim,
         float* const* out, int64_t at = 0) {
  for (; at + W * kLanes <= dim; at += W * kLanes) {
    vec acc[M][W] = {};
    for (int64_t slot = begin; slot < end; ++slot) {
      vec parts[W];
      for (int v = 0; v < W; ++v) {
        fetch_ahead(values + slot * dim + at + v * kLanes, kLanes);
        parts[v] = load(values + slot * dim + at + v * kLanes);
      }
      for (int i = 0; i < M; ++i) {
        const vec weight = spread(weights[i * stride + slot]);
        for (int v = 0; v < W; ++v) acc[i][v] = multiply_add(weight, parts[v], acc[i][v]);
      }
    }
    for (int i = 0; i < M; ++i) {
      for (int v = 0; v < W; ++v) store(out[i] + at + v * kLanes, acc[i][v]);
    }
  }
  if constexpr (W > 1) {
    mix<M, W / 2>(weights, stride, values, begin, end, dim, out, at);
  } else if (at < dim) {
    for (int i = 0; i < M; ++i) {
      vec acc = {};
      for (int64_t slot = begin; slot < end; ++slot) {
        const vec value = load_part(values + slot * dim + at, dim - at, 0);
        acc = multiply_add(spread(weights[i * stride + slot]), value, acc);
      }
      store_part(out[i] + at, acc, dim - at);
    }
  }
}

// Attention of M rows of queries [M, dim] to keys and values [slots, dim]. Finite values that a row may not see change no
// bit of its result, and neither do the other rows.
template <int M>
void attend(const float* query, const float* keys, const float* values, const Seen* seen, const float* const* biases,
            float scale, float* scores, int64_t slots, int64_t dim, float* const* out) {
  int64_t begin = seen[0].begin, end = seen[0].end;
  for (int i = 1; i < M; ++i) {
    begin = std::min(begin, seen[i].begin);
    end = std::max(end, seen[i].end);
  }
  constexpr int R = M <= 2 ? 4 : 2;
  int64_t slot = begin;
  for (; slot + R <= end; slot += R) dot_block<M, R, true>(query, keys + slot * dim, nullptr, scores + slot, slots, dim);
  for (; slot < end; ++slot) dot_block<M, 1, true>(query, keys + slot * dim, nullptr, scores + slot, slots, dim);
  for (int i = 0; i < M; ++i) {
    float* row = scores + i * slots;
    std::fill(row + begin, row + seen[i].begin, 0.0f);
    std::fill(row + seen[i].end, row + end, 0.0f);
    const float* bias = biases[i] ? biases[i] + seen[i].begin : nullptr;
    weights_of(row + seen[i].begin, bias, scale, seen[i].end - seen[i].begin);
  }
  mix<M>(scores, slots, values, begin, end, dim, out);
}

// The slots that a bias leaves a row: without the masked ones at both ends, and slot 0 where it leaves none (a pad).
inline Seen unmasked(const float* bias, int64_t slots) {
  int64_t begin = 0, end = slots;
  while (end > 1 && bias[end - 1] < -1e37f) --end;
  while (begin < end - 1 && bias[begin] < -1e37f) ++begin;
  return {begin, end};
}

// Scores of the rows that a thread works on.
float* score_buffer(int64_t count) {
  struct Buffer {
    float* data = nullptr;
    int64_t size = 0;
    ~Buffer() { delete[] data; }
  };
  static thread_local Buffer buffer;
  if (buffer.size < count) {
    delete[] buffer.data;
    buffer.size = 2 * count;
    buffer.data = new float[buffer.size];
  }
  return buffer.data;
}

// x[i] /= 1 + exp(-gate[i]).
void gate_by(float* x, const float* gate, int64_t dim) {
  int64_t at = 0;
  for (; at + kLanes <= dim; at += kLanes) store(x + at, load(x + at) / (exp(-load(gate + at)) + 1.0f));
  if (at < dim) {
    const vec last = load_part(x + at, dim - at, 0) / (exp(-load_part(gate + at, dim - at, 0)) + 1.0f);
    store_part(x + at, last, dim - at);
  }
}

// The tokens of some sequences of a batch; see mfx_attention_block.
struct Tokens {
  int64_t batch, length, past, slots;
  const int64_t* first;
  const float* bias;
  int64_t bias_batch;
};

// Takes qkv [batch * length, groups, stored, dim] apart: queries [batch, groups, heads, length, dim], keys and values go to
// their slots; both are normalised and rotated.
void take_apart(const AttentionBlock& block, const Tokens& tokens, const float* qkv, const float* cos, const float* sin,
                float* query, float* key, float* value) {
  const int64_t groups = block.groups, heads = block.heads, dim = block.dim, stored = block.stored;
  const int64_t length = tokens.length, rotary_dim = block.rotary_dim;
  parallel(tokens.batch * length * groups, 4 * (heads + 2) * dim, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t token = item / groups, group = item % groups, row = token / length, position = token % length;
      const float *from = qkv + item * stored * dim, *cosine = cos + token * rotary_dim, *sine = sin + token * rotary_dim;
      for (int64_t head = 0; head < heads; ++head) {
        float* to = query + (((row * groups + group) * heads + head) * length + position) * dim;
        norm_and_rotate(from + head * dim, block.query_norm, block.eps, cosine, sine, to, dim, rotary_dim);
      }
      const int64_t to = ((row * groups + group) * tokens.slots + tokens.past + position) * dim;
      norm_and_rotate(from + (stored - 2) * dim, block.key_norm, block.eps, cosine, sine, key + to, dim, rotary_dim);
      std::copy_n(from + (stored - 1) * dim, dim, value + to);
    }
  }, true);
}

// attended [batch * length, groups * heads * dim]: attention, and its gates in qkv if there are any.
void attend_all(const AttentionBlock& block, const Tokens& tokens, const float* qkv, const float* query, const float* key,
                const float* value, float* attended) {
  const int64_t groups = block.groups, heads = block.heads, dim = block.dim;
  const int64_t length = tokens.length, past = tokens.past, slots = tokens.slots;
  const int64_t parts = (heads * length + kQueryRows - 1) / kQueryRows;
  parallel(tokens.batch * groups * parts, 4 * kQueryRows * dim * (past + length), [&](int64_t begin, int64_t end) {
    float* scores = score_buffer(kQueryRows * slots);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t pair = item / parts, row = pair / groups, group = pair % groups;
      const int64_t start = item % parts * kQueryRows, count = std::min<int64_t>(kQueryRows, heads * length - start);
      Seen seen[kQueryRows];
      const float* biases[kQueryRows] = {};
      float* targets[kQueryRows];
      for (int64_t i = 0; i < count; ++i) {
        const int64_t head = (start + i) / length, position = (start + i) % length;
        if (tokens.bias) {
          biases[i] = tokens.bias + ((tokens.bias_batch == 1 ? 0 : row) * length + position) * slots;
          seen[i] = unmasked(biases[i], past + length);
        } else {
          seen[i] = {std::min(tokens.first[row], past + position), past + position + 1};
        }
        targets[i] = attended + ((row * length + position) * groups * heads + group * heads + head) * dim;
      }
      const float* q = query + (pair * heads * length + start) * dim;
      const float *keys = key + pair * slots * dim, *values = value + pair * slots * dim;
      if (count == 4) attend<4>(q, keys, values, seen, biases, block.scale, scores, slots, dim, targets);
      if (count == 3) attend<3>(q, keys, values, seen, biases, block.scale, scores, slots, dim, targets);
      if (count == 2) attend<2>(q, keys, values, seen, biases, block.scale, scores, slots, dim, targets);
      if (count == 1) attend<1>(q, keys, values, seen, biases, block.scale, scores, slots, dim, targets);
      for (int64_t i = 0; i < count && block.stored > heads + 2; ++i) {
        const int64_t head = (start + i) / length, token = row * length + (start + i) % length;
        gate_by(targets[i], qkv + ((token * groups + group) * block.stored + heads + head) * dim, dim);
      }
    }
  }, true);
}

// Rows of a product beyond which more of them only take memory.
constexpr int64_t kRowsAtOnce = 512;

inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

}  // namespace

extern "C" {

// Attention over the new tokens x [batch * length, depth of qkv], which are normalised already, and those in the cache:
// key and value [batch, groups, slots, dim], where the new ones are written from slot `past` on. out [batch * length, rows
// of proj]. A new token sees the slots from its row's entry of `first` [batch] to its own (a pad sees itself), or what
// bias [bias_batch, length, slots] says if that is not null. cos and sin [batch * length, rotary_dim].
// scratch: rows * (qkv + 2 * attended + max(depth, attended)) floats for the rows of mfx_sequences_at_once.
void mfx_attention_block(const AttentionBlock* block, const float* x, const float* cos, const float* sin,
                         const int64_t* first, const float* bias, float* key, float* value, float* out, float* scratch,
                         int64_t batch, int64_t length, int64_t past, int64_t slots, int64_t bias_batch) {
  if (length < 1) return;
  const int64_t step = larger(1, kRowsAtOnce / length), per_row = block->groups * slots * block->dim;
  const int64_t attended_size = block->groups * block->heads * block->dim;
  for (int64_t row = 0; row < batch; row += step) {
    const int64_t count = std::min(step, batch - row), rows = count * length, start = row * length;
    const float* biases = bias && bias_batch > 1 ? bias + start * slots : bias;
    const Tokens tokens{count, length, past, slots, first ? first + row : nullptr, biases, bias_batch};
    float* const qkv = scratch;
    float* const query = qkv + rows * block->qkv->rows;
    float* const attended = query + rows * attended_size;
    float* const rest = attended + rows * attended_size;
    float *const keys = key + row * per_row, *const values = value + row * per_row;
    product(*block->qkv, x + start * block->qkv->depth, qkv, rows, rest, 0);
    take_apart(*block, tokens, qkv, cos + start * block->rotary_dim, sin + start * block->rotary_dim, query, keys, values);
    attend_all(*block, tokens, qkv, query, keys, values, attended);
    product(*block->proj, attended, out + start * block->proj->rows, rows, rest, 0);
  }
}

// How many of `batch` sequences of `length` tokens are worked off at a time.
int64_t mfx_sequences_at_once(int64_t batch, int64_t length) {
  return std::min(batch, larger(1, kRowsAtOnce / larger(1, length)));
}

// out [rows, outputs of fc2] = (silu(gate) * up) fc2^T, where the rows of fc1 are pairs of gate and up; see mfx_product
// for the limit. scratch: min(rows, kRowsAtOnce) * (outputs of fc1 + larger depth) floats.
void mfx_mlp(const Matrix* fc1, const Matrix* fc2, const float* x, float* out, float* scratch, int64_t rows, float limit) {
  const float bound = limit > 0 ? limit : std::numeric_limits<float>::infinity();
  for (int64_t row = 0; row < rows; row += kRowsAtOnce) {
    const int64_t count = std::min(kRowsAtOnce, rows - row);
    float* const active = scratch;
    float* const rest = active + count * num_outputs(*fc1);
    product(*fc1, x + row * fc1->depth, active, count, rest, bound);
    product(*fc2, active, out + row * fc2->rows, count, rest, 0);
  }
}

// Runs `count` dense layers on the residual stream hidden [batch * length, size], in place. keys and values hold the cache
// of each layer; the rest is that of mfx_attention_block and mfx_mlp. scratch: 2 * batch * length * size floats, and behind
// them what the hungrier of both needs.
void mfx_dense_layers(const DenseLayer* layers, int64_t count, float* hidden, const float* cos, const float* sin,
                      const int64_t* first, const float* bias, float* const* keys, float* const* values, float* scratch,
                      int64_t batch, int64_t length, int64_t past, int64_t slots, int64_t bias_batch, float eps,
                      float limit) {
  const int64_t rows = batch * length, size = layers->fc1->depth;
  float* const normed = scratch;
  float* const update = normed + rows * size;
  float* const rest = update + rows * size;
  for (int64_t i = 0; i < count; ++i) {
    const DenseLayer& layer = layers[i];
    if (i == 0) {
      mfx_rms_norm(hidden, layer.input_norm, normed, rows, size, eps);
    } else {
      mfx_add_rms_norm(hidden, update, layer.input_norm, hidden, normed, rows, size, eps);
    }
    mfx_attention_block(layer.attention, normed, cos, sin, first, bias, keys[i], values[i], update, rest, batch, length,
                        past, slots, bias_batch);
    mfx_add_rms_norm(hidden, update, layer.mlp_norm, hidden, normed, rows, size, eps);
    mfx_mlp(layer.fc1, layer.fc2, normed, update, rest, rows, limit);
  }
  for (int64_t i = 0; i < rows * size; ++i) hidden[i] += update[i];
}

// Experts with packed matrices: first[e] gives gate times up and second[e] brings it back. out [., hidden] = sum over the
// pairs (row, expert) of factor * (silu(x gate) * (x up)) down; pairs are sorted by expert, those of expert e are
// starts[e] to starts[e + 1]. out starts at 0. scratch: most pairs of an expert * (2 hidden + ffn + max(hidden, ffn)).
void mfx_packed_experts(const Matrix* first, const Matrix* second, const float* x, const int32_t* pair_rows,
                        const float* pair_factors, const int64_t* starts, float* scratch, float* out, int64_t experts,
                        float limit) {
  const float bound = limit > 0 ? limit : std::numeric_limits<float>::infinity();
  const int64_t hidden = first->depth, ffn = second->depth;
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t begin = starts[e], count = starts[e + 1] - begin;
    if (!count) continue;
    float* const gathered = scratch;
    float* const mixed = gathered + count * hidden;
    float* const active = mixed + count * hidden;
    float* const rest = active + count * ffn;
    for (int64_t i = 0; i < count; ++i) std::copy_n(x + pair_rows[begin + i] * hidden, hidden, gathered + i * hidden);
    product(first[e], gathered, active, count, rest, bound);
    product(second[e], active, mixed, count, rest, 0);
    for (int64_t i = 0; i < count; ++i) {
      float* sum = out + pair_rows[begin + i] * hidden;
      const vec factor = spread(pair_factors[begin + i]);
      int64_t at = 0;
      for (; at + kLanes <= hidden; at += kLanes) {
        store(sum + at, multiply_add(factor, load(mixed + i * hidden + at), load(sum + at)));
      }
      for (; at < hidden; ++at) sum[at] += pair_factors[begin + i] * mixed[i * hidden + at];
    }
  }
}

}  // extern "C"
