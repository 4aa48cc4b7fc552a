// What a processor and its memory can do at most, to measure the kernels with.

#include "common.h"

using namespace mfx;

extern "C" {

// Reads `bytes` bytes but for a last part, each thread at several places in turn, which is faster than one after another;
// returns how many that were: the most that a product that has to read them could reach.
int64_t mfx_read(const uint32_t* from, int64_t bytes) {
  constexpr int64_t kStreams = 8, kStep = 4 * kLanes, kUnit = kStreams * kStep;
  const int64_t units = bytes / (4 * kUnit);
  parallel(units, kUnit, [&](int64_t begin, int64_t end) {
    uvec bits[4] = {};
    const int64_t each = (end - begin) * kStep;
    const uint32_t* start = from + begin * kUnit;
    for (int64_t at = 0; at < each; at += kStep) {
      for (int64_t stream = 0; stream < kStreams; ++stream) {
        const uint32_t* part = start + stream * each + at;
        for (int v = 0; v < 4; ++v) bits[v] |= *reinterpret_cast<const uvec*>(part + v * kLanes);
      }
    }
    asm volatile("" : : "m"(bits));  // else a compiler could leave all of it out
  }, true);
  return units * 4 * kUnit;
}

// Does `rounds` rounds of multiply-adds that do not wait for each other, in all threads; returns the floating-point operations.
int64_t mfx_multiply_adds(int64_t rounds, float factor) {
  constexpr int64_t kAtOnce = 12, kPart = 1024;
  parallel(rounds / kPart, kPart * kAtOnce * kLanes, [&](int64_t begin, int64_t end) {
    const vec value = spread(factor);
    vec acc[kAtOnce];
    for (int64_t i = 0; i < kAtOnce; ++i) acc[i] = spread(static_cast<float>(i));  // equal ones would be done once
    for (int64_t round = begin * kPart; round < end * kPart; ++round) {
      for (vec& one : acc) one = multiply_add(one, value, value);
    }
    asm volatile("" : : "m"(acc));
  }, true);
  return rounds / kPart * kPart * kAtOnce * kLanes * 2;
}

}  // extern "C"
