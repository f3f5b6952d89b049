// One solve as the kernels see it. `context.py` has the same fields in the same order, all of them 8 bytes wide.
#pragma once
#include <cstdint>

namespace equilibria {

// The same number as in context.py. Raise both when a field or an argument changes its meaning: the package then refuses an
// extension built from other sources at import, before the extension reads memory wrongly.
constexpr long INTERFACE = 3;

enum Status : int8_t { RUNNING = -1, CONVERGED = 0, MAX_STEPS = 1, NONFINITE = 2, STALLED = 3, DIVERGED = 4 };  // as in solution.py

// Settings of single rows in a pool, where rows start at different steps; one entry per position. `pool.py` has the same fields.
struct Own {
    const int64_t *born;      // step at which the row starts
    const int64_t *end;       // step at which its steps run out
    const int64_t *limit;     // slots of its history at first
    const int64_t *most;      // slots that its history may grow to
    const int64_t *trust;     // Anderson: steps without a smaller residual before the row drops its history
    const int64_t *watchful;  // nonzero: the progress of the row is checked
    const void *rtol, *atol, *natural;
    int64_t *stopped;         // written: the rows that stopped in this call
};

struct Context {
    int64_t n;         // numbers per row
    int64_t rows;      // rows carried: the rows of the tensors of a call
    int64_t batch;     // rows at the start
    int64_t first_limit;  // number of history slots of a row before its history may grow
    int64_t most;      // largest number of slots
    int64_t slots;     // slots that are allocated
    int64_t wanted;    // written: slots that the next call needs
    int64_t core_size; // Broyden, Gram form of Anderson: rows and columns of a core matrix
    int64_t patience;  // 0: unlimited
    int64_t watchful;  // nonzero: progress is checked
    int64_t threads;   // largest number of threads
    int64_t patience_of_trust;  // Anderson: steps without a smaller residual before a row drops its history
    double rtol, atol;          // tolerance = rtol size + atol
    double floor;               // relative residual below which a row may be called stalled
    double natural;             // size below which no residual counts as divergence
    double damping;
    double threshold;  // smallest share of its length that may be left of a difference (GMRES: of an image) after orthogonalisation; Gram form: added to the diagonal
    double slow;       // a full history grows after a step that leaves more than this share of the residual
    double lowest, highest, longest;  // written at step 0: range of the sizes and largest residual
    const int64_t* place;  // (rows,) position in the batch; null: 0, 1, 2, ...
    // the following arrays have one row or one number per position in the batch
    int8_t* status;
    int64_t *steps, *best_step, *waiting, *waited, *limit, *count;
    int32_t* order;   // (batch, most), slots of a row's history, oldest first
    uint8_t* current; // nonzero: the best iterate is the last one and not yet copied to `answer`
    void *excess, *length, *size, *scale, *first_length, *first_size, *peak, *last, *milestone;
    void *answer;                      // (batch, n), best iterates
    void *residual, *value;            // (batch, n), Anderson: of the previous iterate; Broyden: last step and the value before it
    void *shortest;                    // Anderson: shortest residual; GMRES: residual a step earlier; Broyden: last length
    void *iterate, *other;             // (batch, n), GMRES: z and z before
    void *core;                        // (batch, core_size, core_size)
    void *const *first, *const *second;  // (slots,) pointers to (batch, n): first and second vectors of the pairs of the history
    const Own* own;  // null: all rows start at step 0 with the settings above
};

}  // namespace equilibria
