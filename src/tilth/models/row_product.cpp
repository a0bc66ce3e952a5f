// Linear layers: rows [n, width] times the transpose of a weight [out, width], plus a bias: sums of ``terms`` fused multiply-adds in
// ascending order, added one after another. W outputs of a panel are computed side by side, so squares of the weight
// are transposed in registers: no copy of it is kept, which would have to follow its updates. Behind them, what lies
// between products in a layer of a decoder, with the bits of torch's functions: nothing is contracted but what says so.
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __AVX512F__
constexpr int W = 16;
#define LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#define FMA _mm512_fmadd_ps
#define ALL _mm512_set1_ps
#else
constexpr int W = 8;
#define LOW 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH 4, 12, 5, 13, 6, 14, 7, 15
#define FMA _mm256_fmadd_ps
#define ALL _mm256_set1_ps
#endif
typedef float Vector __attribute__((vector_size(4 * W)));
typedef Vector Unaligned __attribute__((aligned(4), may_alias));
#ifdef __clang__
#define ZIP(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t Mask __attribute__((vector_size(4 * W)));
#define ZIP(a, b, ...) __builtin_shuffle(a, b, Mask{__VA_ARGS__})
#endif

static inline Vector load(const float* from) { return *(const Unaligned*)from; }

// Each pass exchanges one bit of the row's number for one of the column's.
static inline void transpose(Vector* a) {
#pragma GCC unroll 4
  for (int done = 1; done < W; done *= 2) {
    Vector b[W];
#pragma GCC unroll 16
    for (int i = 0; i < W / 2; i++) {
      b[2 * i] = ZIP(a[i], a[i + W / 2], LOW);
      b[2 * i + 1] = ZIP(a[i], a[i + W / 2], HIGH);
    }
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) a[i] = b[i];
  }
}

// Outputs [N, skip..W) of one panel of W rows of the weight.
template <int N>
static void panel(const float* x, const float* weight, const float* bias, float* y, long width, long out, long terms,
                  int skip) {
  Vector total[N], sum[N];
  for (long begin = 0; begin < width; begin += terms) {
    const long end = begin + terms < width ? begin + terms : width;
    for (int n = 0; n < N; n++) sum[n] = Vector{};
    for (long k = begin; k < end; k += W) {
      const long at = k + W <= width ? k : width - W;  // the last square reaches back
      const int first = k - at, last = end - at < W ? end - at : W;
      Vector square[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; i++) {
        square[i] = load(weight + i * width + at);
        __builtin_prefetch(weight + (i + W) * width + at);  // the next panel's, which no prefetcher guesses
      }
      transpose(square);
      if (last - first == W) {
#pragma GCC unroll 16
        for (int j = 0; j < W; j++)
#pragma GCC unroll 16
          for (int n = 0; n < N; n++) sum[n] = FMA(ALL(x[n * width + at + j]), square[j], sum[n]);
      } else {
        for (int j = first; j < last; j++)
          for (int n = 0; n < N; n++) sum[n] = FMA(ALL(x[n * width + at + j]), square[j], sum[n]);
      }
    }
    for (int n = 0; n < N; n++)
      total[n] = begin ? total[n] + sum[n] : bias ? load(bias) + sum[n] : sum[n];
  }
  for (int n = 0; n < N; n++)
    for (int i = skip; i < W; i++) y[n * out + i] = total[n][i];
}

// A team of one would cost a part of a microsecond.
template <class Body>
static void each(long n, int threads, Body body) {
  if (threads > 1) {
#pragma omp parallel for num_threads(threads)
    for (long i = 0; i < n; i++) body(i);
  } else {
    for (long i = 0; i < n; i++) body(i);
  }
}

template <int N>
static void product(const float* x, const float* weight, const float* bias, float* y, long width, long out, long terms,
                    int threads) {
  each((out + W - 1) / W, threads, [=](long number) {
    const long wanted = number * W, at = wanted + W <= out ? wanted : out - W;  // the last panel reaches back
    panel<N>(x, weight + at * width, bias ? bias + at : bias, y + at, width, out, terms, wanted - at);
  });
}

// Weights [N, keys] times P * W columns of v [keys, width]; two vectors side by side hide what an addition takes.
template <int N, int P>
static void columns(const float* weights, const float* v, float* y, long keys, long width, long terms, long block) {
  Vector total[N * P] = {}, part[N * P] = {}, sum[N * P];
  for (long start = 0; start < keys; start += block) {
    const long stop = start + block < keys ? start + block : keys;
    for (long begin = start; begin < stop; begin += terms) {
      const long end = begin + terms < stop ? begin + terms : stop;
      for (int i = 0; i < N * P; i++) sum[i] = Vector{};
      for (long k = begin; k < end; k++)
#pragma GCC unroll 2
        for (int p = 0; p < P; p++) {
          const Vector row = load(v + k * width + p * W);
#pragma GCC unroll 16
          for (int n = 0; n < N; n++) sum[n * P + p] = FMA(ALL(weights[n * keys + k]), row, sum[n * P + p]);
        }
      for (int i = 0; i < N * P; i++) part[i] = begin > start ? part[i] + sum[i] : sum[i];
    }
    for (int i = 0; i < N * P; i++) total[i] = start ? total[i] + part[i] : part[i];
  }
  for (int i = 0; i < N * P; i++) *(Unaligned*)(y + i / P * width + i % P * W) = total[i];
}

template <int N>
static void mix(const float* weights, const float* v, float* y, long keys, long width, long terms, long block) {
  constexpr int P = N < 8 ? 2 : 1;
  long at = 0;
  for (; at + P * W <= width; at += P * W) columns<N, P>(weights, v + at, y + at, keys, width, terms, block);
  if (at < width) columns<N, 1>(weights, v + at, y + at, keys, width, terms, block);
}

#define EVERY(f) f<1>, f<2>, f<3>, f<4>, f<5>, f<6>, f<7>, f<8>, f<9>, f<10>, f<11>, f<12>, f<13>, f<14>, f<15>
using Product = void(const float*, const float*, const float*, float*, long, long, long, int);
using Mix = void(const float*, const float*, float*, long, long, long, long);
static Product* const products[] = {EVERY(product)};
static Mix* const mixes[] = {EVERY(mix)};

extern "C" void row_product(const float* x, const float* weight, const float* bias, float* y, long rows, long width,
                            long out, long terms, int threads) {
  products[rows - 1](x, weight, bias, y, width, out, terms, threads);
}

// stride: elements from one head's keys (values) to the next one's.
extern "C" void row_scores(const float* q, const float* k, float* y, long heads, long stride, long rows, long width,
                           long keys, long terms, int threads) {
  each(heads, threads, [=](long h) {
    products[rows - 1](q + h * rows * width, k + h * stride, nullptr, y + h * rows * keys, width, keys, terms, 1);
  });
}

extern "C" void row_values(const float* weights, const float* v, float* y, long heads, long stride, long rows,
                           long width, long keys, long terms, long block, int threads) {
  each(heads, threads, [=](long h) {
    mixes[rows - 1](weights + h * rows * keys, v + h * stride, y + h * rows * width, keys, width, terms, block);
  });
}

// ---- between products ----

using Unary = Vector (*)(Vector);

// Sum of squares in the order of torch's sums over rows: vectors of 8, four side by side; sums of 16, 256 and 4096 of
// these apart; then vectors that are left, elements that are left, and the lanes of the sum one after another.
static float squares(const float* x, long width) {
  const long vectors = width / 8, fours = vectors / 4;
  __m256 sum[4][4] = {};
  const auto square = [x](long at) {
    const __m256 some = _mm256_loadu_ps(x + at * 8);
    return some * some;
  };
  for (long i = 0; i < fours;) {
    for (int k = 0; k < 4; k++) sum[0][k] += square(4 * i + k);
    if (++i % 16) continue;
    for (long level = 1, span = 16; level < 4; level++, span *= 16) {
      for (int k = 0; k < 4; k++) {
        sum[level][k] += sum[level - 1][k];
        sum[level - 1][k] = __m256{};
      }
      if (i / span % 16) break;
    }
  }
  for (int level = 1; level < 4; level++)
    for (int k = 0; k < 4; k++) sum[0][k] += sum[level][k];
  for (long at = 4 * fours; at < vectors; at++) sum[0][0] += square(at);
  for (int k = 1; k < 4; k++) sum[0][0] += sum[0][k];
  float found = 0;
  for (long i = vectors * 8; i < width; i++) found += x[i] * x[i];
  for (int i = 0; i < 8; i++) found += sum[0][0][i];
  return found;
}

// f(vectors of a, of b) for n elements; y may be a or b. The last vector is filled with zeros.
template <class Body>
static inline void each_vector(const float* a, const float* b, float* y, long n, Body f) {
  long at = 0;
  for (; at + W <= n; at += W) *(Unaligned*)(y + at) = f(load(a + at), load(b + at));
  if (at < n) {
    Vector left{}, right{};
    std::memcpy(&left, a + at, 4 * (n - at));
    std::memcpy(&right, b + at, 4 * (n - at));
    left = f(left, right);
    std::memcpy(y + at, &left, 4 * (n - at));
  }
}

static void norm(const float* x, const float* weight, float* y, long width, float eps) {
  const float scale = 1 / std::sqrt(squares(x, width) / (float)width + eps);
  each_vector(x, weight, y, width, [scale](Vector a, Vector b) { return a * scale * b; });
}

static void gated(const float* gate, const float* up, float* y, long n, Unary exp) {
  each_vector(gate, up, y, n, [exp](Vector a, Vector b) { return a / (exp(-a) + 1.0f) * b; });
}

// In place, for a whole number of vectors.
static void softmax(float* x, long n, Unary exp) {
  Vector most = load(x);
  for (long at = W; at < n; at += W) {
    const Vector some = load(x + at);
    most = some > most ? some : most;
  }
  float top = most[0];
  for (int i = 1; i < W; i++) top = most[i] > top ? most[i] : top;
  each_vector(x, x, x, n, [top, exp](Vector a, Vector) { return exp(a - top); });
  Vector sum = load(x);
  for (long at = W; at < n; at += W) sum += load(x + at);
  for (int half = W / 2; half; half /= 2)
    for (int i = 0; i < half; i++) sum[i] += sum[i + half];
  const float scale = 1 / sum[0];
  each_vector(x, x, x, n, [scale](Vector a, Vector) { return a * scale; });
}

// One head, in place.
static void rotate(float* x, const float* cos, const float* sin, long width) {
  const long half = width / 2;
  long i = 0;
  for (; i + W <= half; i += W) {
    const Vector a = load(x + i), b = load(x + half + i);
    *(Unaligned*)(x + i) = FMA(b, load(sin + i), a * load(cos + i));
    *(Unaligned*)(x + half + i) = FMA(a, load(sin + half + i), b * load(cos + half + i));
  }
  for (; i < half; i++) {
    const float a = x[i], b = x[half + i];
    x[i] = std::fma(b, sin[i], a * cos[i]);
    x[half + i] = std::fma(a, sin[half + i], b * cos[half + i]);
  }
}

// Heads of one row, normed if there is a weight, and rotated; y may be x.
static void turned(const float* x, const float* weight, const float* cos, const float* sin, float* y, long heads,
                   long width, float eps) {
  for (long head = 0; head < heads; head++, x += width, y += width) {
    if (weight)
      norm(x, weight, y, width, eps);
    else
      std::memmove(y, x, 4 * width);
    rotate(y, cos, sin, width);
  }
}

extern "C" void row_norm(const float* x, const float* weight, float* y, long rows, long width, float eps,
                         int threads) {
  each(rows, threads, [=](long row) { norm(x + row * width, weight, y + row * width, width, eps); });
}

extern "C" void row_gated(const float* gate, const float* up, float* y, Unary exp, long rows, long width,
                          long gate_stride, long up_stride, int threads) {
  each(rows, threads,
       [=](long row) { gated(gate + row * gate_stride, up + row * up_stride, y + row * width, width, exp); });
}

extern "C" void row_softmax(float* x, Unary exp, long rows, long width) {
  for (long row = 0; row < rows; row++) softmax(x + row * width, width, exp);
}

// x [rows, heads + kv_heads + more, width], a row each stride: queries and keys.
extern "C" void row_heads(const float* x, const float* q_weight, const float* k_weight, const float* cos,
                          const float* sin, float* q, float* k, long rows, long stride, long heads, long kv_heads,
                          long width, float eps, int threads) {
  each(rows, threads, [=](long row) {
    const float *mine = x + row * stride, *c = cos + row * width, *s = sin + row * width;
    turned(mine, q_weight, c, s, q + row * heads * width, heads, width, eps);
    turned(mine + heads * width, k_weight, c, s, k + row * kv_heads * width, kv_heads, width, eps);
  });
}

// ---- a pass of one token a row through a decoder ----

struct Linear {
  const float *weight, *bias;
  long terms;
};
struct Block {
  Linear q, k, v, o, gate, up, down;
  const float *before, *after, *q_norm, *k_norm;
  float *keys, *values;
  long window;
};
struct Sizes {
  long rows, width, heads, kv_heads, head, inner, blocks, length, capacity, threads, shared;
  long scores, values, block;
};

struct Pass {
  const Sizes& s;
  const long* start;
  const float *cos, *sin;
  float eps, scale;
  Unary exp;

  void linear(const float* x, const Linear& layer, float* y, long width, long out) const {
    const int threads = width * out < s.shared ? 1 : (int)s.threads;
    products[s.rows - 1](x, layer.weight, layer.bias, y, width, out, layer.terms, threads);
  }

  void norms(const float* x, const float* weight, float* y) const {
    for (long row = 0; row < s.rows; row++) norm(x + row * s.width, weight, y + row * s.width, s.width, eps);
  }

  void attend(const Block& b, const float* q, const float* k, const float* v, float* scores, float* mixed) const {
    const long group = s.heads / s.kv_heads, work = s.rows * s.heads * s.length * s.head;
    each(s.rows * s.kv_heads, work < s.shared ? 1 : (int)s.threads, [=](long at) {
      const long now = start[at / s.kv_heads];
      float *keys = b.keys + at * s.capacity * s.head, *values = b.values + at * s.capacity * s.head;
      std::memcpy(keys + now * s.head, k + at * s.head, 4 * s.head);
      std::memcpy(values + now * s.head, v + at * s.head, 4 * s.head);
      float* mine = scores + at * group * s.length;
      products[group - 1](q + at * group * s.head, keys, nullptr, mine, s.head, s.length, s.scores, 1);
      for (long row = 0; row < group; row++) {
        for (long key = 0; key < s.length; key++)
          if (key > now || (b.window && key <= now - b.window)) mine[row * s.length + key] = -INFINITY;
        softmax(mine + row * s.length, s.length, exp);
      }
      mixes[group - 1](mine, values, mixed + at * group * s.head, s.length, s.head, s.values, s.block);
    });
  }

  void block(const Block& b, float* x, float* room) const {
    const long n = s.rows, wide = s.heads * s.head, narrow = s.kv_heads * s.head;
    float *h = room, *q = h + n * s.width, *k = q + n * wide, *v = k + n * narrow, *mixed = v + n * narrow;
    float *gate = mixed + n * wide, *up = gate + n * s.inner, *rest = up + n * s.inner;
    const auto plus = [](Vector a, Vector b) { return a + b; };
    norms(x, b.before, h);
    linear(h, b.q, q, s.width, wide);
    linear(h, b.k, k, s.width, narrow);
    linear(h, b.v, v, s.width, narrow);
    for (long row = 0; row < n; row++) {
      const float *c = cos + row * s.head, *t = sin + row * s.head;
      turned(q + row * wide, b.q_norm, c, t, q + row * wide, s.heads, s.head, eps);
      turned(k + row * narrow, b.k_norm, c, t, k + row * narrow, s.kv_heads, s.head, eps);
    }
    each_vector(q, q, q, n * wide, [this](Vector a, Vector) { return a * scale; });
    attend(b, q, k, v, rest, mixed);
    linear(mixed, b.o, h, wide, s.width);
    each_vector(x, h, x, n * s.width, plus);
    norms(x, b.after, h);
    linear(h, b.gate, gate, s.width, s.inner);
    linear(h, b.up, up, s.width, s.inner);
    gated(gate, up, gate, n * s.inner, exp);
    linear(gate, b.down, h, s.inner, s.width);
    each_vector(x, h, x, n * s.width, plus);
  }
};

// x [rows, width]: embeddings, and hidden states after the final norm; cos, sin [rows, head]; start [rows], positions.
extern "C" void row_pass(float* x, const float* cos, const float* sin, const long* start, const Block* blocks,
                         const Sizes* sizes, const float* last, Unary exp, float eps, float scale) {
  const Sizes& s = *sizes;
  const long every = s.width + 2 * (s.heads + s.kv_heads) * s.head + 2 * s.inner + s.heads * s.length;
  std::vector<float> room(s.rows * every);
  const Pass pass{s, start, cos, sin, eps, scale, exp};
  for (long i = 0; i < s.blocks; i++) pass.block(blocks[i], x, room.data());
  pass.norms(x, last, x);
}
