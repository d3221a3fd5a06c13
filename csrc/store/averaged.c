/* averaged.c: the step of averaged tensors, such as BatchNorm's running statistics.
 *
 * Worker i stages the values x_i of its b_i samples. A ticket moves the store's values x toward them:
 *
 *     x - share * lr * sum(b_i (x - x_i)) / sum(b_i)
 *
 * lr is the group's: the part of the way that a global batch goes, BatchNorm's momentum. The share is 1 in a round
 * that all wait for, otherwise the ticket's part of a global batch (policy/view_round.c), so that all tickets of a
 * global batch together move x about as far as a round. The result lies between x and x_i: neither many workers nor
 * stale ones make x overshoot, and a variance stays positive. (Adding the workers' changes would do both.) A value
 * that all workers stage as it is keeps its bits, and so does one that is not finite.
 */
#include <math.h>
#include <string.h>

#include "store/gradients.h"

/* sum += weight * (x - theirs). A value that is not finite does not move x, and such an x is not moved. */
static void add_distance(float *sum, const float *x, const float *theirs, float weight, size_t length) {
    for (size_t i = 0; i < length; i++) {
        float distance = weight * (x[i] - theirs[i]);
        sum[i] += isfinite(distance) ? distance : 0;
    }
}

void averaged_step(const pyps_store *s, const struct step *step, float lr, uint64_t at) {
    const struct ticket *ticket = &s->ticket;
    const struct source alone = {.slot = ticket->slot, .staging = ticket->staging};
    bool round = ticket->kind == TICKET_ROUND;
    const struct source *sources = round ? s->sources : &alone;
    uint32_t count = round ? s->source_count : 1;
    const float *x = step->old[0], *first = staging_data(s, sources->slot, sources->staging) + at;
    float *out = step->new[0], part = ticket->share * lr;
    size_t bytes = step->length * sizeof *out;

    memset(out, 0, bytes);
    for (uint32_t i = 0; i < count; i++)
        if (staging_has(s, sources[i].slot, sources[i].staging, at))
            add_distance(out, x, staging_data(s, sources[i].slot, sources[i].staging) + at,
                         count == 1 ? 1.0f : (float)sources[i].samples, step->length);
    if (count > 1) kernels_chosen()->divide(out, (float)ticket->samples, step->length);
    for (size_t i = 0; i < step->length; i++) out[i] = x[i] - part * out[i];
    for (size_t i = 0; i < step->length && count == 1 && part == 1.0f; i++)
        if (isfinite(x[i]) && isfinite(first[i])) out[i] = first[i];
    if (step->copy) memcpy(step->copy, out, bytes);
}
