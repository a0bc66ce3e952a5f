// Linear layers: rows [n, width] times the transpose of a weight [out, width], plus a bias: sums of ``terms`` fused multiply-adds in
// ascending order, added one after another. W outputs of a panel are computed side by side, so squares of the weight
// are transposed in registers: no copy of it is kept, which would have to follow its updates.
#include <cstdint>

#ifdef __AVX512F__
constexpr int W = 16;
#define LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#else
constexpr int W = 8;
#define LOW 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH 4, 12, 5, 13, 6, 14, 7, 15
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
          for (int n = 0; n < N; n++) sum[n] += x[n * width + at + j] * square[j];
      } else {
        for (int j = first; j < last; j++)
          for (int n = 0; n < N; n++) sum[n] += x[n * width + at + j] * square[j];
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
          for (int n = 0; n < N; n++) sum[n * P + p] += weights[n * keys + k] * row;
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
