/* fuzz_main.c: runs a fuzz target without libFuzzer: every line of a corpus, then seeded mutations of them.
 *
 * Usage: TARGET CORPUS SEED RUNS. A corpus is text: one input a line, in hexadecimal.
 */
#include <inttypes.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SEEDS   512u
#define LONGEST 65536u

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size);
__attribute__((weak)) int LLVMFuzzerInitialize(int *argc, char ***argv);

static struct {
    unsigned char *data;
    size_t size;
} seeds[SEEDS];
static unsigned count;
static uint64_t state = 1;

static uint64_t draw(uint64_t below) { /* xorshift64* (Vigna 2016) */
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return state * UINT64_C(2685821657736338717) % below;
}

static bool read_seed(FILE *corpus) {
    static char line[2 * LONGEST + 2];
    unsigned char *data = malloc(LONGEST);
    unsigned value;
    size_t size = 0;
    if (!data || count == SEEDS || !fgets(line, sizeof line, corpus)) return free(data), false;
    while (sscanf(line + 2 * size, "%2x", &value) == 1) data[size++] = (unsigned char)value;
    seeds[count].data = data, seeds[count++].size = size;
    return true;
}

static size_t mutate(unsigned char *data, size_t size) {
    static const uint64_t telling[] = {0,          1,         UINT64_MAX, INT32_MAX,
                                       UINT32_MAX, INT64_MAX, 0x7f800000, 0xffc00000};
    for (uint64_t n = 1 + draw(8); n > 0; n--) {
        size_t at = size ? draw(size) : 0;
        uint64_t value = draw(2) ? telling[draw(8)] : draw(UINT64_MAX);
        size_t width = (size_t)1 << draw(4);
        switch (draw(4)) {
        case 0:
            if (at < size) data[at] ^= (unsigned char)(1u << draw(8));
            break;
        case 1:
            if (at + width <= size) memcpy(data + at, &value, width);
            break;
        case 2:
            if (draw(8) == 0) size = at;
            break;
        default:
            if (size + width <= LONGEST) memcpy(data + size, &value, width), size += width;
        }
    }
    return size;
}

int main(int argc, char **argv) {
    static unsigned char data[LONGEST];
    FILE *corpus = argc == 4 ? fopen(argv[1], "r") : NULL;
    if (!corpus) return fprintf(stderr, "usage: %s CORPUS SEED RUNS\n", argv[0]), 2;
    uint64_t seed = strtoull(argv[2], NULL, 10), runs = strtoull(argv[3], NULL, 10);
    while (read_seed(corpus)) continue;
    fclose(corpus);
    state += seed;
    if (LLVMFuzzerInitialize) LLVMFuzzerInitialize(&argc, &argv);
    for (unsigned i = 0; i < count; i++) LLVMFuzzerTestOneInput(seeds[i].data, seeds[i].size);
    for (uint64_t run = 0; run < runs; run++) {
        unsigned from = (unsigned)draw(count);
        memcpy(data, seeds[from].data, seeds[from].size);
        LLVMFuzzerTestOneInput(data, mutate(data, seeds[from].size));
    }
    printf("%u seeds and %" PRIu64 " mutations: no fault\n", count, runs);
    for (unsigned i = 0; i < count; i++) free(seeds[i].data);
    return 0;
}
