/* What rows of a model go through on a CPU: products with weights, in 8 bits or in float32, and what lies
 * between them. Compiled on the machine that runs it (build.py), called through ctypes (library.py).
 *
 *     integers.h    sums of 8-bit products with the instructions of this CPU
 *     between.h     norm, gate and rotation
 *     product.h     products with rounded weights, many rows of them in amx.h
 *     floats.h      products with weights in float32
 *     one_row.h     attention of a single row, and of many in many_rows.h
 *     layers.h      whole layers
 *     stored.h      stored chunks, laid where they belong and moved
 *
 * The definition of every function here is its PyTorch twin: kernels/rounded.py for products
 * in 8 bits and linear.py for those in float32, elementwise.py, rope.py and attention.py for the others,
 * and for layers model/decoder.py, which calls all of these one by one.
 *
 * All functions may be called from any thread at any time: they write to what they are given and
 * to memory of their own. `threads` of them work on one call, by OpenMP where it was compiled in.
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#ifdef _OPENMP
int omp_get_thread_num(void); /* not every compiler has omp.h */
#else
static int omp_get_thread_num(void) { return 0; }
#endif

#define INLINE static inline __attribute__((always_inline))
#define MIN(a, b) ((a) < (b) ? (a) : (b))

static int64_t whole(int64_t n, int64_t of) { return (n + of - 1) / of * of; }

#include "integers.h"
#include "between.h"
#include "product.h"
#include "floats.h"
#include "one_row.h"
#include "many_rows.h"
#include "layers.h"
#include "stored.h"
