// Codes of gradients (tilth.parallel.quantise, tilth.parallel.compress), many tensors a call, with the bits of torch's
// functions: nothing is contracted. Plain loops, which a compiler turns into those of vectors.
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#define FAST __attribute__((optimize("O3")))

// A run of values that are worked on in a cache, and their blocks of random numbers.
constexpr long RUN = 256, BLOCKS = RUN / 4;

// Philox4x32-10 as in tilth.core.random: values 4 * block .. of a stream, uniform in [0, 1).
FAST static void uniform(uint64_t seed, uint64_t stream, uint64_t block, float* u) {
  const uint32_t s0 = (uint32_t)stream, s1 = (uint32_t)(stream >> 32);
  uint32_t words[4][BLOCKS];
  for (long j = 0; j < BLOCKS; j++) {
    uint32_t a = (uint32_t)(block + j), b = (uint32_t)((block + j) >> 32), c = s0, d = s1;
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++) {
      const uint64_t p = (uint64_t)a * 0xD2511F53u, q = (uint64_t)c * 0xCD9E8D57u;
      a = (uint32_t)(q >> 32) ^ b ^ k0;
      c = (uint32_t)(p >> 32) ^ d ^ k1;
      b = (uint32_t)q;
      d = (uint32_t)p;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    words[0][j] = a;
    words[1][j] = b;
    words[2][j] = c;
    words[3][j] = d;
  }
  for (long j = 0; j < BLOCKS; j++) {
    u[4 * j] = (float)(int32_t)(words[0][j] >> 8) * 0x1p-24f;
    u[4 * j + 1] = (float)(int32_t)(words[1][j] >> 8) * 0x1p-24f;
    u[4 * j + 2] = (float)(int32_t)(words[2][j] >> 8) * 0x1p-24f;
    u[4 * j + 3] = (float)(int32_t)(words[3][j] >> 8) * 0x1p-24f;
  }
}

// Sylvester's Hadamard matrix times each whole block of 32 values, times a factor, in place: sums and differences of
// values at a distance of 1, 2, .. 16, in this order.
static inline __m256 crossed(__m256 x) {
  x = _mm256_blend_ps(x + _mm256_permute_ps(x, 0xB1), _mm256_permute_ps(x, 0xB1) - x, 0xAA);
  x = _mm256_blend_ps(x + _mm256_permute_ps(x, 0x4E), _mm256_permute_ps(x, 0x4E) - x, 0xCC);
  const __m256 other = _mm256_permute2f128_ps(x, x, 1);
  return _mm256_blend_ps(x + other, other - x, 0xF0);
}

static void transformed(float* x, long count, float factor) {
  const __m256 times = _mm256_set1_ps(factor);
  for (long at = 0; at + 32 <= count; at += 32, x += 32) {
    const __m256 a = crossed(_mm256_loadu_ps(x)), b = crossed(_mm256_loadu_ps(x + 8));
    const __m256 c = crossed(_mm256_loadu_ps(x + 16)), d = crossed(_mm256_loadu_ps(x + 24));
    const __m256 ab = a + b, ba = a - b, cd = c + d, dc = c - d;
    _mm256_storeu_ps(x, (ab + cd) * times);
    _mm256_storeu_ps(x + 8, (ba + dc) * times);
    _mm256_storeu_ps(x + 16, (ab - cd) * times);
    _mm256_storeu_ps(x + 24, (ba - dc) * times);
  }
}

template <class Body>
static void each(long n, int threads, Body body) {
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
  for (long i = 0; i < n; i++) body(i);
}

// Bits of the greatest magnitude: they have the order of magnitudes.
FAST static uint32_t magnitude(const float* x, long n) {
  int32_t most = 0;
  for (long i = 0; i < n; i++) {
    int32_t own;
    std::memcpy(&own, x + i, 4);
    own &= 0x7fffffff;
    most = own > most ? own : most;
  }
  return (uint32_t)most;
}

static float greatest(const float* x, long n) {
  const uint32_t bits = magnitude(x, n);
  float found;
  std::memcpy(&found, &bits, 4);
  return found;
}

// The integer below x / scale + u; no value is further from 0 than ``most`` scales, or it is not finite.
FAST static void rounded(const float* __restrict x, const float* __restrict u, float scale, int most, long n,
                         uint8_t* __restrict q) {
  const float step = scale > 0 ? scale : 1.0f;
  for (long i = 0; i < n; i++) {
    const float wanted = x[i] / step + u[i];
    int32_t whole = (int32_t)wanted;
    whole -= (float)whole > wanted;
    whole = whole < -most ? -most : whole;
    whole = whole > most ? most : whole;
    q[i] = (uint8_t)(whole + most);
  }
}

// Values [RUN] to bytes [RUN * bits / 8], the first in the lowest bits.
FAST static void packed(const uint8_t* q, int bits, uint8_t* out) {
  if (bits == 8) {
    std::memcpy(out, q, RUN);
  } else if (bits == 4) {
    for (long i = 0; i < RUN / 2; i++) out[i] = q[2 * i] | q[2 * i + 1] << 4;
  } else if (bits == 2) {
    for (long i = 0; i < RUN / 4; i++) out[i] = q[4 * i] | q[4 * i + 1] << 2 | q[4 * i + 2] << 4 | q[4 * i + 3] << 6;
  } else {
    for (long i = 0; i < RUN / 8; i++) {
      int found = 0;
      for (int j = 0; j < 8; j++) found |= q[8 * i + j] << j;
      out[i] = (uint8_t)found;
    }
  }
}

FAST static void unpacked(const uint8_t* code, int bits, uint8_t* q) {
  if (bits == 8) {
    std::memcpy(q, code, RUN);
  } else if (bits == 4) {
    for (long i = 0; i < RUN / 2; i++) {
      q[2 * i] = code[i] & 15;
      q[2 * i + 1] = code[i] >> 4;
    }
  } else if (bits == 2) {
    for (long i = 0; i < RUN / 4; i++)
      for (int j = 0; j < 4; j++) q[4 * i + j] = code[i] >> 2 * j & 3;
  } else {
    for (long i = 0; i < RUN / 8; i++)
      for (int j = 0; j < 8; j++) q[8 * i + j] = code[i] >> j & 1;
  }
}

FAST static void scaled(const uint8_t* q, float scale, float most, long n, float* y) {
  for (long i = 0; i < n; i++) y[i] = ((float)(int32_t)q[i] - most) * scale;
}

FAST static void negative(const float* x, long n, uint8_t* q) {
  for (long i = 0; i < n; i++) q[i] = x[i] < 0;
}

FAST static void with_signs(const uint8_t* q, float scale, long n, float* y) {
  for (long i = 0; i < n; i++) y[i] = q[i] ? -scale : scale;
}

// Calls f(index of the group, first value, values) for the parts of groups in a run that begins at ``start``.
template <class Body>
static void parts_of_groups(long start, long n, long group, Body f) {
  for (long at = 0; at < n;) {
    const long number = (start + at) / group, end = (number + 1) * group - start, stop = end < n ? end : n;
    f(number, at, stop - at);
    at = stop;
  }
}

static void dither(const float* x, long count, uint8_t* code, int bits, long group, uint64_t seed, uint64_t stream) {
  const int most = (1 << (bits - 1)) - 1;
  const long groups = (count + group - 1) / group;
  std::vector<float> scales(groups);
  for (long i = 0; i < groups; i++)
    scales[i] = greatest(x + i * group, i + 1 < groups ? group : count - i * group) / (float)most;
  std::memcpy(code, scales.data(), 4 * groups);
  code += 4 * groups;
  float u[RUN];
  uint8_t q[RUN], out[RUN];
  for (long start = 0; start < count; start += RUN) {
    const long n = count - start < RUN ? count - start : RUN;
    uniform(seed, stream, start / 4, u);
    if (n < RUN) std::memset(q, 0, RUN);
    parts_of_groups(start, n, group, [&](long number, long at, long size) {
      rounded(x + start + at, u + at, scales[number], most, size, q + at);
    });
    packed(q, bits, out);
    std::memcpy(code + start * bits / 8, out, (n * bits + 7) / 8);
  }
}

static void undithered(const uint8_t* code, long count, float* y, int bits, long group) {
  const float most = (float)((1 << (bits - 1)) - 1);
  const uint8_t* scales = code;
  code += 4 * ((count + group - 1) / group);
  uint8_t q[RUN], in[RUN];
  for (long start = 0; start < count; start += RUN) {
    const long n = count - start < RUN ? count - start : RUN;
    std::memcpy(in, code + start * bits / 8, (n * bits + 7) / 8);
    unpacked(in, bits, q);
    parts_of_groups(start, n, group, [&](long number, long at, long size) {
      float scale;
      std::memcpy(&scale, scales + 4 * number, 4);  // at any address
      scaled(q + at, scale, most, size, y + start + at);
    });
  }
}

// 1 where a value is negative.
static void signs(const float* x, long count, uint8_t* out) {
  uint8_t q[RUN], bytes[RUN];
  for (long start = 0; start < count; start += RUN) {
    const long n = count - start < RUN ? count - start : RUN;
    if (n < RUN) std::memset(q, 0, RUN);
    negative(x + start, n, q);
    packed(q, 1, bytes);
    std::memcpy(out + start / 8, bytes, (n + 7) / 8);
  }
}

static void from_signs(const uint8_t* in, long count, float scale, float* y) {
  uint8_t q[RUN], bytes[RUN];
  for (long start = 0; start < count; start += RUN) {
    const long n = count - start < RUN ? count - start : RUN;
    std::memcpy(bytes, in + start / 8, (n + 7) / 8);
    unpacked(bytes, 1, q);
    with_signs(q, scale, n, y + start);
  }
}

// Places, ascending, and values of the ``kept`` greatest magnitudes, of equal ones the first. A bin has those that
// share their first bits, so few candidates are left to choose from.
static void greatest_of(const float* x, long count, long kept, int32_t* code) {
  constexpr int SHIFT = 20, BINS = 1 << 11;
  std::vector<uint32_t> bins(4 * BINS);
  const auto bits = [x](long i) {
    uint32_t own;
    std::memcpy(&own, x + i, 4);
    return own & 0x7fffffffu;
  };
  for (long i = 0; i < count; i++) bins[(i & 3) * BINS + (bits(i) >> SHIFT)]++;  // four: the same bin often follows
  long found = 0;
  uint32_t bin = BINS;
  while (found < kept) {
    bin--;
    for (int i = 0; i < 4; i++) found += bins[i * BINS + bin];
  }
  std::vector<int32_t> places;
  places.reserve(found);
  const uint32_t least = bin << SHIFT;
  for (long start = 0; start < count; start += 16) {
    const long stop = start + 16 < count ? start + 16 : count;
    if (magnitude(x + start, stop - start) < least) continue;
    for (long i = start; i < stop; i++)
      if (bits(i) >= least) places.push_back((int32_t)i);
  }
  std::vector<uint32_t> sizes(places.size());
  for (size_t i = 0; i < sizes.size(); i++) sizes[i] = bits(places[i]);
  std::nth_element(sizes.begin(), sizes.begin() + (kept - 1), sizes.end(), std::greater<uint32_t>());
  const uint32_t last = sizes[kept - 1];
  long ties = kept;
  for (long i = 0; i < kept; i++) ties -= sizes[i] > last;
  for (const int32_t place : places) {
    if (bits(place) < last || (bits(place) == last && ties-- <= 0)) continue;
    *code = place;
    std::memcpy(code + kept, x + place, 4);
    code++;
  }
}

// Of a tensor: its values, how many, its code; the stream of its random numbers, or how many values it keeps.
struct Part {
  float* values;
  long count;
  uint8_t* code;
  uint64_t more;
};

extern "C" void dither_encode(const Part* parts, long n, int bits, long group, long seed, int threads) {
  each(n, threads, [=](long i) {
    const Part& p = parts[i];
    dither(p.values, p.count, p.code, bits, group, (uint64_t)seed, p.more);
  });
}

extern "C" void dither_decode(const Part* parts, long n, int bits, long group, int threads) {
  each(n, threads, [=](long i) { undithered(parts[i].code, parts[i].count, parts[i].values, bits, group); });
}

extern "C" void signs_encode(const Part* parts, long n, const float* scales, int threads) {
  each(n, threads, [=](long i) {
    std::memcpy(parts[i].code, scales + i, 4);
    signs(parts[i].values, parts[i].count, parts[i].code + 4);
  });
}

extern "C" void signs_decode(const Part* parts, long n, int threads) {
  each(n, threads, [=](long i) {
    float scale;
    std::memcpy(&scale, parts[i].code, 4);  // at any address
    from_signs(parts[i].code + 4, parts[i].count, scale, parts[i].values);
  });
}

extern "C" void greatest_encode(const Part* parts, long n, int threads) {
  each(n, threads, [=](long i) {
    greatest_of(parts[i].values, parts[i].count, (long)parts[i].more, (int32_t*)parts[i].code);
  });
}

extern "C" void hadamard(const Part* parts, long n, float factor, int threads) {
  each(n, threads, [=](long i) { transformed(parts[i].values, parts[i].count, factor); });
}
