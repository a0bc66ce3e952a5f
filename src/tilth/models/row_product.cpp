// Rows [n, width] times the transpose of a weight [out, width], plus a bias: sums of ``terms`` fused multiply-adds in
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

template <int N>
static void product(const float* x, const float* weight, const float* bias, float* y, long width, long out, long terms,
                    int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (long number = 0; number < (out + W - 1) / W; number++) {
    const long wanted = number * W, at = wanted + W <= out ? wanted : out - W;  // the last panel reaches back
    panel<N>(x, weight + at * width, bias ? bias + at : bias, y + at, width, out, terms, wanted - at);
  }
}

using Product = void(const float*, const float*, const float*, float*, long, long, long, int);
static Product* const products[] = {product<1>, product<2>, product<3>, product<4>, product<5>,
                                    product<6>, product<7>, product<8>, product<9>, product<10>,
                                    product<11>, product<12>, product<13>, product<14>, product<15>};

extern "C" void row_product(const float* x, const float* weight, const float* bias, float* y, long rows, long width,
                            long out, long terms, int threads) {
  products[rows - 1](x, weight, bias, y, width, out, terms, threads);
}
