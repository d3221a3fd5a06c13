/* kernels_scalar.c: the specification of the arithmetic. The compiler may vectorise it; the bits are the
 * same. */
#include <math.h>

#define WIDTH 1
#define VEC   float
#define TARGET
#define LOAD(p)      (*(p))
#define STORE(p, x)  (*(p) = (x))
#define SET(x)       (x)
#define ADD(a, b)    ((a) + (b))
#define SUB(a, b)    ((a) - (b))
#define MUL(a, b)    ((a) * (b))
#define DIV(a, b)    ((a) / (b))
#define SQRT(a)      sqrtf(a)
#define NAME(x)      scalar_##x
#define TABLE        kernels_scalar
#define TABLE_NAME   "scalar"
#define TAIL(member) (void)0

#include "kernels_template.h"
