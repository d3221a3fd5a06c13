/* sketch.c: a gradient as a few numbers that keep inner products.
 *
 * Each value is added with a pseudo-random sign to one of SKETCH sums (a count sketch: Charikar, Chen, Farach-Colton:
 * ICALP 2002). The inner product of two sketches is that of the two gradients plus noise of mean 0, about
 * |g| |h| / sqrt(SKETCH). Sums are taken in a fixed order, so every machine finds the same bits.
 */
#include "policy/view.h"

/* splitmix64 */
static uint64_t mixed(uint64_t x) {
    x += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

void sketch_add(float *sketch, const float *values, uint64_t first, uint64_t count) {
    for (uint64_t row = 0; row < count; row += SKETCH) {
        uint64_t random = mixed((first + row) / SKETCH), length = count - row < SKETCH ? count - row : SKETCH;
        uint32_t signs = (uint32_t)random,
                 turn = (uint32_t)(random >> 32) % SKETCH; /* a column has no sum of its own */
        for (uint32_t i = 0; i < length; i++)
            sketch[(i + turn) % SKETCH] += signs >> i & 1 ? values[row + i] : -values[row + i];
    }
}
