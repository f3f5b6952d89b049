// Quantities of every row outside of the steps: sizes of right-hand sides, relative residuals, and whether numbers are finite.
#pragma once
#include <cmath>
#include <limits>

#include "vectors.h"

namespace equilibria {

// Return the root mean square of a row, in float64. If its squares leave float64, the row is divided by its largest entry first.
template <class T>
EQ_INLINE double root_mean_square(const T* v, int64_t n) {
    const double least = std::sqrt(std::numeric_limits<double>::min()) / std::numeric_limits<double>::epsilon();
    double x[CHUNK], unit = 1;
    for (int attempt = 0;; ++attempt) {
        Lanes<double> square;
        square.clear();
        double largest = 0;
        for (int64_t j = 0; j < n; j += CHUNK) {
            const int64_t m = n - j < CHUNK ? n - j : CHUNK;
            for (int64_t i = 0; i < m; ++i) x[i] = double(v[j + i]) / unit;
            square.add(x, x, m);
            if (attempt == 0 && sizeof(T) == 8)
                for (int64_t i = 0; i < m; ++i) largest = std::fabs(x[i]) > largest ? std::fabs(x[i]) : largest;
        }
        const double size = std::sqrt(square.sum()) / std::sqrt(double(n)) * unit;
        const bool usual = size > least && size < 1 / least;
        if (attempt || sizeof(T) < 8 || usual || !(largest > 0) || std::isinf(largest)) return size;
        unit = largest;
    }
}

// Divide every row by its root mean square: rhs = v / scale. Rows that are zero or not finite have scale 1. `size` is the
// root mean square of the rows of rhs.
template <class T>
EQ_INLINE void normalize(int64_t rows, int64_t n, const T* v, T* rhs, T* scale, T* size) {
    const T root = T(std::sqrt(double(n)));
    for (int64_t r = 0; r < rows; ++r, v += n, rhs += n) {
        const T found = T(root_mean_square(v, n));
        const T by = found > 0 && found < std::numeric_limits<T>::infinity() ? found : T(1);
        for (int64_t i = 0; i < n; ++i) rhs[i] = v[i] / by;
        scale[r] = by;
        size[r] = std::sqrt(dot<T>(rhs, rhs, n)) / root;
    }
}

// Return true if every number is zero.
template <class T>
EQ_INLINE bool all_zero(const T* x, int64_t count) {
    for (int64_t i = 0; i < count; ++i)
        if (x[i] != 0) return false;
    return true;
}

// Write |a - b| / |c| of every row into `out`, or |a| / |c| without b. With `told` the function returns the largest difference
// of a ratio from it, over the rows where this is not nan. Without `told` it returns the largest ratio, which is nan if one is
// nan. The result is also nan if the squares of a row of c may leave the dtype, or if the status of a row is not 0.
template <class T>
EQ_INLINE double ratios(int64_t rows, int64_t n, const T* a, const T* b, const T* c, const T* told, const int8_t* status, T* out) {
    const T tiny = std::numeric_limits<T>::min(), least = std::sqrt(tiny) / std::numeric_limits<T>::epsilon();
    const double nan = std::numeric_limits<double>::quiet_NaN();
    double worst = 0;
    for (int64_t r = 0; r < rows; ++r) {
        Lanes<T> above, below;
        above.clear();
        below.clear();
        T x[CHUNK];
        for (int64_t j = r * n; j < (r + 1) * n; j += CHUNK) {
            const int64_t m = (r + 1) * n - j < CHUNK ? (r + 1) * n - j : CHUNK;
            if (b) difference(x, a + j, b + j, m);
            else copy(x, a + j, m);
            above.add(x, x, m);
            below.add(c + j, c + j, m);
        }
        const T length = std::sqrt(above.sum()), size = std::sqrt(below.sum());
        out[r] = length / (size < tiny ? tiny : size);
        const double value = told ? std::fabs(double(out[r]) - double(told[r])) : double(out[r]);
        // the squares of nonzero numbers may be zero
        const bool vanished = size == 0 && length == 0 && !(all_zero(c + r * n, n) && all_zero(a + r * n, n));
        const bool unusual = !(size < 1 / least) || (size < least && (size > 0 || length > 0)) || vanished;
        if (unusual || (status && status[r])) worst = nan;
        else if (worst == worst && (told ? value > worst : !(value <= worst))) worst = value;
    }
    return worst;
}

// Return true if every number is finite.
template <class T>
EQ_INLINE bool all_finite(const T* x, int64_t count) {
    constexpr int64_t WIDTH = 128 / sizeof(T);
    T zero[WIDTH] = {};  // x - x is zero, or nan where x is not finite
    int64_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH)
        for (int64_t k = 0; k < WIDTH; ++k) zero[k] += x[i + k] - x[i + k];
    for (; i < count; ++i) zero[0] += x[i] - x[i];
    T sum = 0;
    for (const T each : zero) sum += each;
    return sum == 0;
}

}  // namespace equilibria
