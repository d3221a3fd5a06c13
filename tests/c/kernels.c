/* kernels.c: every instruction set gives the scalar's bits, for every length up to 130 and any alignment. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../csrc/kernels.h"

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
    memset(new, 0, sizeof new);
    pyps_hyper hyper = {.lr = 0.1f,
                        .weight_decay = 0.01f,
                        .momentum = 0.9f,
                        .dampening = 0.1f,
                        .beta1 = 0.9f,
                        .beta2 = 0.99f,
                        .eps = 1e-8f};
    hyper.nesterov = rand() % 2;
    struct step_constants constants = kernels_constants(optimizer, &hyper, 0.5f, (uint64_t)(rand() % 3));
    for (int side = 0; side < 2; side++) {
        struct step step = {.gradient = gradient + at, .length = length};
        for (unsigned v = 0; v <= kernels_states(optimizer); v++)
            step.old[v] = old[v] + at, step.new[v] = new[side][v] + at;
        (side ? b : a)->update[optimizer](&step, &constants);
        float *sum = new[side][2] + at; /* the round's reduction, where the optimizer has no second state */
        if (optimizer == PYPS_ADAMW) continue;
        (side ? b : a)->weigh(sum, gradient + at, 3.0f, length);
        (side ? b : a)->weigh_add(sum, old[0] + at, 7.0f, length);
        (side ? b : a)->divide(sum, 10.0f, length);
    }
    return memcmp(new[0], new[1], sizeof new[0]);
}

int main(void) {
    const struct kernels *chosen = kernels_chosen();
    srand(1);
    for (unsigned optimizer = PYPS_SGD; optimizer <= PYPS_ADAMW; optimizer++)
        for (size_t length = 0; length <= 130; length++)
            for (size_t at = 0; at < 4; at++)
                if (differ(&kernels_scalar, chosen, optimizer, length, at)) {
                    printf("optimizer %u, length %zu, offset %zu: %s differs from scalar\n", optimizer,
                           length, at, chosen->name);
                    return 1;
                }
    printf("%s\n", chosen->name);
    return 0;
}
