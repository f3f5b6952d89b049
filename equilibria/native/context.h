// One solve as the kernels see it. `context.py` has the same fields in the same order, all of them 8 bytes wide.
#pragma once
#include <cstdint>

namespace equilibria {

enum Status : int8_t { RUNNING = -1, CONVERGED = 0, NONFINITE = 2, STALLED = 3, DIVERGED = 4 };  // as in solution.py

struct Context {
    int64_t n;         // numbers per row
    int64_t rows;      // rows carried: those that the tensors of a call have
    int64_t batch;     // rows at the start
    int64_t first_limit;  // slots of history that a row fills before it may ask for more
    int64_t most;      // slots that it may fill at most
    int64_t slots;     // slots that have memory
    int64_t wanted;    // written: slots that the next call needs
    int64_t core_size; // Broyden: rows and columns of a core matrix
    int64_t patience;  // 0: unlimited
    int64_t watchful;  // progress is followed
    int64_t threads;   // at most
    int64_t patience_of_trust;  // Anderson: steps without a shorter residual before a row forgets its history
    double rtol, atol;          // tolerance = rtol size + atol
    double floor;               // relative residual below which a row may be called stalled
    double natural;             // size below which no residual counts as far away
    double damping;
    double threshold;  // share of its length that must be left of a difference; for GMRES of an image
    double slow;       // a step that leaves more of the residual than this lets a full history grow
    double lowest, highest, longest;  // written at step 0: range of the sizes and largest residual
    const int64_t* place;  // (rows,) place in the batch; null: the same
    // from here on one row (or number) per place in the batch
    int8_t* status;
    int64_t *steps, *best_step, *waiting, *waited, *limit, *count;
    int32_t* order;   // (batch, most), slots of a row's history, oldest first
    uint8_t* current; // the best iterate is the last one, and not yet in `answer`
    void *excess, *length, *size, *scale, *first_length, *first_size, *peak, *last, *milestone;
    void *answer;                      // (batch, n), best iterates
    void *residual, *value;            // (batch, n), Anderson: of the iterate before; Broyden: last step, value before it
    void *shortest;                    // Anderson: shortest residual; GMRES: residual a step earlier; Broyden: last length
    void *iterate, *other;             // (batch, n), GMRES: z and z before
    void *core;                        // (batch, core_size, core_size)
    void *const *first, *const *second;  // (slots,) of (batch, n): both halves of the pairs of the history
};

}  // namespace equilibria
