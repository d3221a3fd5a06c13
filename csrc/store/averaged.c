/* averaged.c: the step of averaged tensors, such as BatchNorm's running statistics.
 *
 * A worker stages the values x_i that it has after its b_i samples. A ticket moves the store's values x toward them:
 *
 *     x - share * sum(b_i (x - x_i)) / sum(b_i)
 *
 * The share is 1 in a round that all wait for, so its result is the workers' mean. Otherwise it is the ticket's part
 * of a global batch (policy/view_round.c): then all tickets of a global batch together move x as far as a round, and
 * the result lies between x and x_i, however old the values were that the worker started from. (Adding each worker's
 * change instead would overshoot with many workers, and make a variance negative.) A value that no worker changed
 * keeps its bits, and one worker alone gives exactly its own.
 */
#include <string.h>

#include "store/store.h"

/* sum += weight * (x - theirs) */
static void add_distance(float *sum, const float *x, const float *theirs, float weight, size_t length) {
    for (size_t i = 0; i < length; i++) sum[i] += weight * (x[i] - theirs[i]);
}

void averaged_step(const pyps_store *s, const struct step *step, uint64_t at) {
    const struct ticket *ticket = &s->ticket;
    const struct source alone = {.slot = ticket->slot, .staging = ticket->staging};
    bool round = ticket->kind == TICKET_ROUND;
    const struct source *sources = round ? s->sources : &alone;
    uint32_t count = round ? s->source_count : 1;
    const float *x = step->old[0], *first = staging_data(s, sources->slot, sources->staging) + at;
    float *out = step->new[0];
    size_t bytes = step->length * sizeof *out;

    memset(out, 0, bytes);
    for (uint32_t i = 0; i < count; i++)
        add_distance(out, x, staging_data(s, sources[i].slot, sources[i].staging) + at,
                     count == 1 ? 1.0f : (float)sources[i].samples, step->length);
    if (count > 1) kernels_chosen()->divide(out, (float)ticket->samples, step->length);
    for (size_t i = 0; i < step->length; i++) out[i] = x[i] - ticket->share * out[i];
    if (count == 1 && ticket->share == 1.0f) memcpy(out, first, bytes);
    for (uint32_t vector = 1; vector <= s->layout.states; vector++) memset(step->new[vector], 0, bytes);
    if (step->copy) memcpy(step->copy, out, bytes);
}
