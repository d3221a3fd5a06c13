/* kernels.c: the chosen instruction set gives the scalar's bits: every optimizer for every length up to 130
 * and any alignment, every codec for lengths around its blocks with every rounding, residual and policy. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../csrc/kernels/kernels.h"

#define LONGEST 136

static float number(void) {
    static const float odd[] = {0.0f, -0.0f, 1e-42f, -1e-38f, 3e38f, 1.0f};
    return rand() % 16 ? (float)(rand() - RAND_MAX / 2) / 1e8f : odd[rand() % 6];
}

static int differ(const struct kernels *a, const struct kernels *b, unsigned optimizer, size_t length,
                  size_t at) {
    static float old[3][LONGEST + 4], new[2][3][LONGEST + 4], gradient[LONGEST + 4];
    for (size_t i = 0; i < LONGEST + 4; i++) {
        for (int v = 0; v < 3; v++) old[v][i] = v == 2 ? number() * number() : number();
        gradient[i] = number();
        if (old[2][i] < 0) old[2][i] = -old[2][i];
    }
    static _Alignas(16) float copies[2][LONGEST + 4], looks[2][LONGEST + 4];
    memset(new, 0, sizeof new), memset(copies, 0, sizeof copies), memset(looks, 0, sizeof looks);
    pyps_hyper hyper = {.lr = 0.1f,
                        .weight_decay = 0.01f,
                        .momentum = 0.9f,
                        .dampening = 0.1f,
                        .beta1 = 0.9f,
                        .beta2 = 0.99f,
                        .eps = 1e-8f,
                        .lr_decay = 0.01f,
                        .clip = rand() % 2 ? 0.0f : 2.0f};
    hyper.nesterov = rand() % 2;
    struct step_constants constants =
        kernels_constants(optimizer, &hyper, 0.5f, 0.75 * (rand() % 3), rand() % 2 ? 1.0f : 0.3f);
    struct ahead ahead = {0.2f, rand() % 2 ? 0.1f : 0, 1e-8f};
    if (rand() % 2 && a->look[optimizer]) constants.ahead = ahead;
    for (int side = 0; side < 2; side++) {
        struct step step = {.gradient = gradient + at, .length = length};
        step.copy = at == 0 ? copies[side] : NULL;
        for (unsigned v = 0; v <= kernels_states(optimizer); v++)
            step.old[v] = old[v] + at, step.new[v] = new[side][v] + at;
        (side ? b : a)->update[optimizer](&step, &constants);
        struct look look = {.to = looks[side] + at, .length = length, .ahead = ahead};
        look.gradient = ahead.direct > 0 ? gradient + at : NULL, look.scale = 0.5f,
        look.clip = constants.clip;
        for (unsigned v = 0; v <= kernels_states(optimizer); v++) look.from[v] = old[v] + at;
        if (a->look[optimizer]) (side ? b : a)->look[optimizer](&look);
        float *sum = new[side][2] + at; /* the round's reduction, where the optimizer has no second state */
        if (kernels_states(optimizer) == 2) continue;
        (side ? b : a)->multiply(sum, gradient + at, 3.0f, length);
        (side ? b : a)->multiply_add(sum, old[0] + at, 7.0f, length);
        (side ? b : a)->divide(sum, 10.0f, length);
        double squares = (side ? b : a)->square_sum(gradient + at, length);
        memcpy(copies[side] + LONGEST + 2, &squares, sizeof squares);
    }
    if (memcmp(looks[0], looks[1], sizeof looks[0])) return 1;
    bool is_ahead = constants.ahead.carried > 0;
    if (at == 0 && !is_ahead && memcmp(copies[1], new[1][0], length * sizeof(float))) return 1;
    return memcmp(new[0], new[1], sizeof new[0]) || memcmp(copies[0], copies[1], sizeof copies[0]);
}

/* Does every optimizer's step say whether its gradient is finite? Also where it is clipped, which takes infinities. */
static bool steps_find(const struct kernels *a, const float *gradient, size_t length, bool finite) {
    static float vectors[2][3][LONGEST + 4];
    pyps_hyper hyper = {.lr = 0.1f, .beta1 = 0.9f, .beta2 = 0.99f, .eps = 1e-8f, .clip = 2.0f};
    for (unsigned optimizer = 0; optimizer < OPTIMIZERS; optimizer++) {
        struct step_constants constants = kernels_constants(optimizer, &hyper, 1.0f, 0, 1.0f);
        struct step step = {.gradient = gradient, .length = length};
        for (unsigned v = 0; v <= kernels_states(optimizer); v++)
            step.old[v] = vectors[0][v], step.new[v] = vectors[1][v];
        if (a->update[optimizer](&step, &constants) != finite) return false;
    }
    return true;
}

/* One value anywhere that is not finite is found, and no other. */
static int misjudges(const struct kernels *a, size_t length, size_t at) {
    static const float bad[] = {NAN, -NAN, INFINITY, -INFINITY};
    float x[LONGEST + 4];
    for (size_t i = 0; i < LONGEST + 4; i++) x[i] = number();
    if (!a->finite(x + at, length) || !steps_find(a, x + at, length, true)) return 1;
    size_t place = (size_t)rand() % (LONGEST + 4);
    x[place] = bad[rand() % 4];
    bool finite = place < at || place >= at + length;
    return a->finite(x + at, length) != finite || !steps_find(a, x + at, length, finite);
}

static void fill(float *x, size_t length, int kind) {
    for (size_t i = 0; i < length; i++) {
        x[i] = number();
        if (kind == 1) x[i] = (float)(rand() - RAND_MAX / 2) * 1e-42f;
        if (kind == 2 && i / 64 % 2) x[i] = 0;
        if (kind == 3 && rand() % 100 == 0) x[i] = rand() % 2 ? NAN : -INFINITY;
        if (kind == 4) x[i] = (float)(rand() % 255 - 127) / 2;        /* ties */
        if (kind == 5) x[i] = (float)(rand() - RAND_MAX / 2) * 1e-7f; /* around the least fp16 */
    }
}

#define RUN 1100
static struct encoded {
    uint8_t codes[4 * RUN];
    float scales[RUN], residual[RUN], decoded[RUN];
    uint64_t found_nonfinite, skipped, stopped_at, done;
} results[2];

static int codecs_differ(const struct kernels *a, const struct kernels *b, uint32_t codec, size_t length,
                         int kind) {
    static float values[RUN + 4], residual[RUN + 4];
    size_t at = (size_t)rand() % 4;
    fill(values, RUN + 4, kind), fill(residual, RUN + 4, kind == 3 ? 0 : kind);
    memset(results, 0, sizeof results);
    struct encoding e = {.codec = codec,
                         .stochastic = codec >= PYPS_INT8 && rand() % 2,
                         .nonfinite = (uint32_t)(rand() % 3),
                         .scale = rand() % 2 ? 1.0f : 0.3f,
                         .seed = (uint64_t)rand() << 32 | (uint64_t)rand(),
                         .first = 256 * (uint64_t)rand(),
                         .values = values + at,
                         .residual = rand() % 2 ? residual + at : NULL,
                         .count = length};
    int keep = rand() % 2;
    for (int side = 0; side < 2; side++) {
        struct encoded *r = &results[side];
        struct encoding mine = e;
        mine.codes = r->codes, mine.scales = r->scales, mine.residual_out = keep ? r->residual : NULL;
        r->done = (side ? b : a)->encode(&mine);
        r->found_nonfinite = mine.found_nonfinite, r->skipped = mine.skipped, r->stopped_at = mine.stopped_at;
        if (r->done) (side ? b : a)->decode(codec, r->decoded, r->codes, r->scales, length);
        else memset(r->codes, 0, sizeof r->codes + sizeof r->scales + sizeof r->residual);
    }
    return memcmp(&results[0], &results[1], sizeof results[0]);
}

static int noisy_codes_differ(const struct kernels *chosen) {
    static uint8_t codes[2 * RUN];
    static float scales[RUN], out[2][RUN];
    for (uint32_t codec = PYPS_BF16; codec <= PYPS_NF4; codec++)
        for (int round = 0; round < 200; round++) { /* what no encoder wrote: infinities, NaN, -128 */
            for (size_t i = 0; i < sizeof codes; i++) codes[i] = (uint8_t)rand();
            for (size_t i = 0; i < RUN; i++) scales[i] = number();
            kernels_scalar.decode(codec, out[0], codes, scales, RUN);
            chosen->decode(codec, out[1], codes, scales, RUN);
            if (memcmp(out[0], out[1], sizeof out[0])) return printf("decode of codec %u differs\n", codec);
        }
    return 0;
}

/* Rounding to bf16, at random and to nearest: the same bits from wherever in the flat vector a run begins. */
static int narrow_differs(const struct kernels *chosen, size_t length) {
    static const uint32_t odd[] = {0x7f800000, 0xff800000, 0x7fffffff, 0xffffffff, 0x7fc00000, 0x7f7fffff};
    static float x[RUN + 4];
    static uint8_t halves[2][2 * RUN];
    size_t at = (size_t)rand() % 4;
    fill(x, RUN + 4, rand() % 6);
    for (size_t i = 0; i < RUN + 4; i += 1 + (size_t)rand() % 60) memcpy(&x[i], &odd[rand() % 6], sizeof *x);
    struct rounding how = {(uint64_t)rand() << 32 | 5, (uint64_t)rand() << 20, (uint64_t)rand() << 12};
    kernels_scalar.narrow(halves[0], x + at, length, &how);
    size_t cut = length ? (size_t)rand() % length : 0; /* in two runs, of which the second begins anywhere */
    struct rounding rest = {how.seed, how.version, how.first + cut};
    chosen->narrow(halves[1], x + at, cut, &how);
    chosen->narrow(halves[1] + 2 * cut, x + at + cut, length - cut, &rest);
    if (memcmp(halves[0], halves[1], 2 * length)) return 1;
    for (size_t i = 0; i < length; i++) {
        float rounded;
        kernels_scalar.decode(PYPS_BF16, &rounded, halves[0] + 2 * i, NULL, 1);
        if (isnan(x[at + i]) != isnan(rounded) || (isinf(x[at + i]) && x[at + i] != rounded)) return 1;
    }
    kernels_scalar.narrow(halves[0], x + at, length, NULL);
    chosen->narrow(halves[1], x + at, length, NULL);
    return memcmp(halves[0], halves[1], 2 * length);
}

int main(void) {
    const struct kernels *chosen = kernels_chosen();
    srand(1);
    for (unsigned optimizer = PYPS_SGD; optimizer < OPTIMIZERS; optimizer++)
        for (size_t length = 0; length <= 130; length++)
            for (size_t at = 0; at < 4; at++)
                if (differ(&kernels_scalar, chosen, optimizer, length, at)) {
                    printf("optimizer %u, length %zu, offset %zu: %s differs from scalar\n", optimizer,
                           length, at, chosen->name);
                    return 1;
                }
    for (uint32_t codec = PYPS_F32; codec < CODECS; codec++)
        for (size_t length = 0; length <= RUN; length += length % 256 < 66 ? 1 : 29)
            for (int kind = 0; kind < 6; kind++)
                if (codecs_differ(&kernels_scalar, chosen, codec, length, kind)) {
                    printf("codec %u, length %zu, values %d: %s differs from scalar\n", codec, length, kind,
                           chosen->name);
                    return 1;
                }
    for (size_t length = 0; length <= 130; length++)
        for (size_t at = 0; at < 4; at++)
            if (misjudges(&kernels_scalar, length, at) || misjudges(chosen, length, at))
                return printf("finite: length %zu, offset %zu\n", length, at);
    if (noisy_codes_differ(chosen)) return 1;
    for (size_t length = 0; length < RUN; length += 1 + length / 300)
        if (narrow_differs(chosen, length)) return printf("narrow: length %zu\n", length);
    printf("%s\n", chosen->name);
    return 0;
}
