// The end of a solve: the relative residual of every row, and how many rows `finished` in loop.py must settle.
#pragma once
#include <cmath>
#include <limits>

#include "record.h"

namespace equilibria {

constexpr double GROWN = 2.0;  // the constants of closed_record.py
constexpr double FALL = 0.99;

// Overwrite `excess`, which is not used any more, with relative residuals; returns the number of rows that may have failed.
// The statuses of a linear system are final: rows that still run have used up their steps.
template <class T>
int64_t finish(const Context& c) {
    const T tiny = std::numeric_limits<T>::min(), least = std::sqrt(tiny) / std::numeric_limits<T>::epsilon();
    const T share = T(FALL / (c.rtol + c.floor / FLOOR));
    int64_t unusual = 0;
    for (int64_t place = 0; place < c.batch; ++place) {
        Row<T> row{c, place};
        const T size = row.of(c.size);
        row.of(c.excess) = row.of(c.length) / (size < tiny ? tiny : size);
        if (c.scale && row.running()) row.status() = MAX_STEPS;
        bool plain = row.status() == CONVERGED;
        if (plain && !c.scale) {
            const bool faint = size < least && c.best_step[place] > 0;  // the squares of its numbers underflow
            // the residual of the start would be within the tolerance of a state that has grown so far; false for nan
            T beyond = row.of(c.first_length) - T(c.atol);
            beyond = beyond < 0 ? T(0) : beyond;
            const bool doubtful = size > T(GROWN) * row.of(c.first_size) && size > beyond * share;
            plain = !faint && !doubtful;
        }
        unusual += !plain;
    }
    return unusual;
}

}  // namespace equilibria
