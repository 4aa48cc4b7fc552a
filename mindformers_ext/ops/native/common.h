// What the kernels share: vectors as wide as the registers of the machine that this is compiled for (GCC's), threads, and
// rows: their products, norms and softmax.

#pragma once

#include <pthread.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <limits>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

namespace mfx {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float vec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef uint32_t uvec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

inline vec load(const float* p) { return *reinterpret_cast<const vec*>(p); }
inline void store(float* p, vec v) { *reinterpret_cast<vec*>(p) = v; }

// Asks for what lies a page behind `count` elements that are read now: a processor's own prefetching ends with each page.
template <class T>
inline void fetch_ahead(const T* p, int64_t count) {
  const char* from = reinterpret_cast<const char*>(p) + 4096;
  for (int64_t at = 0; at < count * static_cast<int64_t>(sizeof(T)); at += 64) __builtin_prefetch(from + at);
}

// Asks for the 32 KiB behind those of `count` elements that are read now, at its eight pages in turn: memory serves several
// places at a time faster than one.
template <class T>
inline void fetch_next_pages(const T* p, int64_t count) {
  constexpr uintptr_t kLine = 64, kPage = 4096, kPages = 8, kBlock = kPages * kPage;
  const uintptr_t from = reinterpret_cast<uintptr_t>(p), to = reinterpret_cast<uintptr_t>(p + count);
  for (uintptr_t at = (from + kLine - 1) / kLine * kLine; at < to; at += kLine) {
    const uintptr_t line = at % kBlock / kLine;
    const uintptr_t next = at / kBlock * kBlock + kBlock + line % kPages * kPage + line / kPages * kLine;
    __builtin_prefetch(reinterpret_cast<const void*>(next), 0, 2);
  }
}

// One value in all lanes. Not `vec{} + value`, which is an addition, as it turns -0 into 0.
inline vec spread(float value) {
#if defined(__AVX512F__)
  return _mm512_set1_ps(value);
#elif defined(__AVX__)
  return _mm256_set1_ps(value);
#else
  vec lanes;
  for (int i = 0; i < kLanes; ++i) lanes[i] = value;
  return lanes;
#endif
}

// a * b + c, rounded once where the processor can: compilers fuse it or not, depending on what stands around it, and a
// row's result would depend on its neighbours.
inline vec multiply_add(vec a, vec b, vec c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX__) && defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

// `count` floats, fewer than a vector holds, and `fill` behind them.
inline vec load_part(const float* p, int64_t count, float fill) {
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = i < count ? p[i] : fill;
  return load(lanes);
}
inline void store_part(float* p, vec v, int64_t count) {
  for (int i = 0; i < count; ++i) p[i] = v[i];
}

// The lanes' sum, halves added to halves.
inline float sum(vec v) {
#if defined(__AVX__)
#if defined(__AVX512F__)
  const __m256 eight = _mm512_castps512_ps256(v) + _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1));
#else
  const __m256 eight = v;
#endif
  const __m128 four = _mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1);
  const __m128 two = four + _mm_movehl_ps(four, four);
  return two[0] + two[1];
#else
  return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}

// exp to 2 ulp: 2^n exp(r) with |r| <= ln(2) / 2, exp(r) by its Taylor polynomial of degree 7; 0 below -87.3 and inf
// above 88.3.
inline vec exp(vec x) {
  const vec clamped = x < -87.3f ? vec{} - 87.3f : (x > 88.7f ? vec{} + 88.7f : x);
  const vec scaled = clamped * 1.44269504f;
  const ivec n = __builtin_convertvector(scaled + (scaled < 0 ? vec{} - 0.5f : vec{} + 0.5f), ivec);
  const vec whole = __builtin_convertvector(n, vec);
  const vec r = (clamped - whole * 0.693359375f) + whole * 2.12194440e-4f;
  vec p = r * (1.0f / 5040) + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const ivec power = (n + 127) << 23;
  return x < -87.3f ? vec{} : p * reinterpret_cast<const vec&>(power);
}

// silu(gate) * up, gates bounded from above and ups on both sides.
inline vec clamped_swiglu(vec gate, vec up, float bound) {
  gate = gate > bound ? vec{} + bound : gate;
  up = up > bound ? vec{} + bound : (up < -bound ? vec{} - bound : up);
  return gate / (exp(-gate) + 1.0f) * up;
}

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#else
  asm volatile("" ::: "memory");
#endif
}

// Threads that may wait awake for a moment after a task. In a decode step the next task comes within microseconds; beside
// MindSpore's own threads, which work in between otherwise, a waiting thread would hold one of the cores.
class Pool {
 public:
  // Works with fewer threads where the system gives no more.
  explicit Pool(int size) {
    try {
      for (; size_ < size; ++size_) std::thread([this, worker = size_] { serve(worker); }).detach();
    } catch (const std::system_error&) {
    }
  }

  int size() const { return size_; }

  // Calls task(context, worker) for every worker of the pool, worker 0 in this thread.
  void run(void (*task)(const void*, int), const void* context, bool more_soon) {
    more_soon_ = more_soon;
    task_ = task;
    context_ = context;
    pending_.store(size_ - 1, std::memory_order_relaxed);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    task(context, 0);
    for (int waited = 0; pending_.load(std::memory_order_acquire); ++waited) {
      if (waited < 2000) {
        pause();
      } else {
        std::this_thread::yield();  // a worker has lost its core
      }
    }
  }

 private:
  void serve(int worker) {
    uint64_t seen = 0;
    bool awake = false;
    for (;;) {
      await(seen, awake);
      seen = generation_.load(std::memory_order_acquire);
      const bool more_soon = more_soon_;
      task_(context_, worker);
      awake = more_soon;
      pending_.fetch_sub(1, std::memory_order_release);
    }
  }

  void await(uint64_t seen, bool awake) {
    using clock = std::chrono::steady_clock;
    const auto until = clock::now() + std::chrono::microseconds(awake ? 200 : 0);
    while (clock::now() < until) {
      for (int i = 0; i < 64; ++i) {
        if (generation_.load(std::memory_order_acquire) != seen) return;
        pause();
      }
    }
    std::unique_lock<std::mutex> lock(mutex_);
    wake_.wait(lock, [&] { return generation_.load(std::memory_order_acquire) != seen; });
  }

  int size_ = 1;
  void (*task_)(const void*, int) = nullptr;
  const void* context_ = nullptr;
  bool more_soon_ = false;
  std::atomic<uint64_t> generation_{0};
  std::atomic<int> pending_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
};

inline int threads = 1;
inline Pool* pool = nullptr;  // never deleted: its threads end with the process
inline std::mutex pool_in_use;

// Calls body(begin, end) on parts of [0, count) in all threads, or once in this one if there is little to do.
template <class Body>
void parallel(int64_t count, int64_t cost, const Body& body, bool more_soon = false) {
  std::unique_lock<std::mutex> lock(pool_in_use, std::defer_lock);
  // Python threads may call side by side: who comes second works alone.
  if (threads == 1 || count < 2 || count * cost < 32768 || !lock.try_lock()) {
    body(int64_t{0}, count);
    return;
  }
  if (!pool) pool = new (std::nothrow) Pool(threads);
  if (!pool || pool->size() == 1) {
    body(int64_t{0}, count);
    return;
  }
  struct Context {
    const Body& body;
    int64_t count;
    int size;
  } context{body, count, pool->size()};
  pool->run(
      [](const void* raw, int worker) {
        const Context& c = *static_cast<const Context*>(raw);
        c.body(c.count * worker / c.size, c.count * (worker + 1) / c.size);
      },
      &context, more_soon);
}

// out[i][j] = x[i] . w[j] for M rows of x and R rows of w. Sums run over k in the same order for every M and R.
// kAhead: what lies behind these rows of w is read next.
template <int M, int R, bool kAhead = false>
inline void dot_block(const float* x, const float* w, const float* bias, float* out, int64_t n, int64_t k) {
  vec acc[M][R] = {};
  int64_t at = 0;
  for (; at + kLanes <= k; at += kLanes) {
    vec weights[R];
    for (int j = 0; j < R; ++j) {
      if (kAhead) fetch_ahead(w + j * k + at, kLanes);
      weights[j] = load(w + j * k + at);
    }
    for (int i = 0; i < M; ++i) {
      const vec row = load(x + i * k + at);
      for (int j = 0; j < R; ++j) acc[i][j] = multiply_add(row, weights[j], acc[i][j]);
    }
  }
  for (int i = 0; i < M; ++i) {
    for (int j = 0; j < R; ++j) {
      if (at < k) {
        const vec row = load_part(x + i * k + at, k - at, 0), weights = load_part(w + j * k + at, k - at, 0);
        acc[i][j] = multiply_add(row, weights, acc[i][j]);
      }
      out[i * n + j] = sum(acc[i][j]) + (bias ? bias[j] : 0);
    }
  }
}

template <int R, bool kAhead = false>
inline void dot_rows(const float* x, const float* w, const float* bias, float* out, int64_t m, int64_t n, int64_t k) {
  int64_t i = 0;
  for (; i + 4 <= m; i += 4) dot_block<4, R, kAhead>(x + i * k, w, bias, out + i * n, n, k);
  if (m - i == 3) dot_block<3, R, kAhead>(x + i * k, w, bias, out + i * n, n, k);
  if (m - i == 2) dot_block<2, R, kAhead>(x + i * k, w, bias, out + i * n, n, k);
  if (m - i == 1) dot_block<1, R, kAhead>(x + i * k, w, bias, out + i * n, n, k);
}

inline float inverse_rms(const float* x, int64_t dim, float eps) {
  vec squares = {};
  int64_t at = 0;
  for (; at + kLanes <= dim; at += kLanes) squares += load(x + at) * load(x + at);
  if (at < dim) {
    const vec last = load_part(x + at, dim - at, 0);
    squares += last * last;
  }
  return 1 / __builtin_sqrtf(sum(squares) / dim + eps);
}

inline void scale_by(const float* x, float factor, const float* weight, float* out, int64_t dim) {
  int64_t at = 0;
  for (; at + kLanes <= dim; at += kLanes) store(out + at, load(x + at) * factor * load(weight + at));
  for (; at < dim; ++at) out[at] = x[at] * factor * weight[at];
}

// out = softmax(scale * scores + bias) over `slots`; `out` may be `scores`, bias may be null.
inline void softmax(const float* scores, const float* bias, float scale, float* out, int64_t slots) {
  vec tops = vec{} - __builtin_inff();
  int64_t at = 0;
  for (; at + kLanes <= slots; at += kLanes) {
    vec value = load(scores + at) * scale;
    if (bias) value = value + load(bias + at);
    store(out + at, value);
    tops = value > tops ? value : tops;
  }
  float highest = tops[0];
  for (int i = 1; i < kLanes; ++i) highest = std::max(highest, tops[i]);
  for (; at < slots; ++at) {
    out[at] = scores[at] * scale + (bias ? bias[at] : 0);
    highest = std::max(highest, out[at]);
  }
  vec totals = {};
  for (at = 0; at + kLanes <= slots; at += kLanes) {
    const vec value = exp(load(out + at) - highest);
    store(out + at, value);
    totals += value;
  }
  if (at < slots) {
    const vec value = exp(load_part(out + at, slots - at, -__builtin_inff()) - highest);
    store_part(out + at, value, slots - at);
    totals += value;
  }
  const float inverse = 1 / sum(totals);
  for (at = 0; at + kLanes <= slots; at += kLanes) store(out + at, load(out + at) * inverse);
  for (; at < slots; ++at) out[at] *= inverse;
}

// Normalises a head, unless weight is null, and rotates its first elements.
inline void norm_and_rotate(const float* x, const float* weight, float eps, const float* cos, const float* sin, float* out,
                            int64_t dim, int64_t rotary_dim) {
  const float factor = weight ? inverse_rms(x, dim, eps) : 1;
  const int64_t half = rotary_dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float first = weight ? x[i] * factor * weight[i] : x[i];
    const float second = weight ? x[i + half] * factor * weight[i + half] : x[i + half];
    out[i] = first * cos[i] - second * sin[i];
    out[i + half] = second * cos[i + half] + first * sin[i + half];
  }
  for (int64_t i = rotary_dim; i < dim; ++i) out[i] = weight ? x[i] * factor * weight[i] : x[i];
}

}  // namespace mfx
