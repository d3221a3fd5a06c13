/* clip_norm.c: the norm of a ticket's gradient, by which the gradient is clipped.
 *
 * No chunk may take a clipped step before the norm over all chunks is known. So the staging buffer that has the
 * ticket's constants has a word for each chunk: 0, or 1 + the bits of the sum of squares of the gradient there.
 * Every participant that applies a chunk first brings all words to their sums, each by a CAS from 0, and then adds
 * them in the order of the chunks: all participants find the same norm, bit for bit. Members of a round begin with
 * their own part of the chunks. They wait a moment for the parts of others, and then sum those too, so no dead or
 * stopped participant is waited for.
 *
 * The words change hands with their staging buffer: its owner clears them before admission, and others write them
 * under the ticket hazard, after they have seen a chunk that lacks the ticket (apply.c). The norm of a push that is
 * applied alone does not depend on others: its owner sums it before admission.
 */
#include <math.h>
#include <string.h>

#include "store/gradients.h"

static a64 *sums_of(const pyps_store *s, const struct staging_header *header) {
    return (a64 *)(void *)((uintptr_t)header + s->layout.staging_sums);
}

static uint64_t word_of_sum(double sum) {
    uint64_t bits;
    if (isnan(sum)) sum = INFINITY;
    memcpy(&bits, &sum, sizeof bits);
    return bits + 1;
}

static double sum_of_word(uint64_t word) {
    double sum;
    word--;
    memcpy(&sum, &word, sizeof sum);
    return sum;
}

static double sum_chunk(const pyps_store *s, uint32_t chunk) {
    uint64_t at = (uint64_t)chunk * s->geometry.chunk_params, end = at + s->chunks[chunk].length;
    double sum = 0;
    const fenv_t callers = kernels_enter();
    for (struct run run; ticket_next_run(s, at, end, &run); at = run.end)
        for (uint64_t from = run.first; from < run.end; from += BLOCK) {
            float block[BLOCK];
            uint64_t count = run.end - from < BLOCK ? run.end - from : BLOCK;
            sum += kernels_chosen()->square_sum(ticket_gradient(s, from, count, block), count);
        }
    kernels_leave(&callers);
    return sum;
}

static uint32_t trained_chunks(const pyps_store *s) {
    return (uint32_t)(s->trained / s->geometry.chunk_params);
}

static void fill_word(pyps_store *s, a64 *words, uint32_t chunk) {
    if (load_acquire(&words[chunk])) return;
    uint64_t word = word_of_sum(sum_chunk(s, chunk));
    FAILPOINT("clip.summed");
    cas_seq(&words[chunk], 0, word); /* if it is lost, another participant has put the same sum there */
    FAILPOINT("clip.shown");
    wake_progress(s);
}

/* A member's part of the chunks of its round, as in finish_round of push.c; of that, each hand of it has a part. */
static void fill_own_part(pyps_store *s, a64 *words) {
    uint32_t parts = s->ticket.kind == TICKET_ROUND ? s->source_count : 0;
    for (uint32_t part = 0; part < parts; part++) {
        if (s->sources[part].slot != worker_slot(s)) continue;
        for (uint32_t chunk = part + parts * s->hand; chunk < trained_chunks(s); chunk += parts * s->hands)
            fill_word(s, words, chunk);
    }
}

void norm_of_ticket(pyps_store *s) {
    const struct staging_header *constants = ticket_constants(s);
    a64 *words = sums_of(s, constants);
    double sum = 0;
    bool moving = true; /* the other members sum; after one stall we do not wait again */
    if (s->norm_ticket == s->ticket.number) return;
    fill_own_part(s, words);
    for (uint32_t chunk = 0; chunk < trained_chunks(s); chunk++) {
        moving = load_acquire(&words[chunk]) || (moving && wait_for_word(s, &words[chunk], 1));
        fill_word(s, words, chunk);
        sum += sum_of_word(load_acquire(&words[chunk]));
    }
    s->norm = sqrt(sum);
    if (s->ticket.kind != TICKET_ROUND) s->norm *= fabs((double)constants->scale);
    s->norm_ticket = s->ticket.number;
}

/* As torch.nn.utils.clip_grad_norm_ does. What is not finite is left as it is. */
float norm_factor(double norm, float clip_norm) {
    double factor = (double)clip_norm / (norm + 1e-6);
    return factor < 1 && isfinite(norm) ? (float)factor : 1.0f;
}

static void forget(const pyps_store *s, a64 *words) {
    for (uint32_t chunk = 0; chunk < trained_chunks(s); chunk++) store_relaxed(&words[chunk], 0);
}

void norm_reset(const pyps_store *s, uint32_t staging) {
    forget(s, sums_of(s, staging_header(s, s->slot, staging)));
}

/* The first ones last: they are applied first. */
static int sum_taken(pyps_store *s, a32 *next, const void *what) {
    const struct ticket *ticket = what;
    const struct staging_header *header = staging_header(s, ticket->slot, ticket->staging);
    s->source_count = 0, s->ticket = *ticket;
    for (uint32_t taken; (taken = next32_relaxed(next)) < trained_chunks(s);)
        fill_word(s, sums_of(s, header), trained_chunks(s) - 1 - taken);
    return PYPS_OK;
}

void norm_of_push(pyps_store *s, uint32_t staging, bool *finite_out) {
    const struct staging_header *header = staging_header(s, s->slot, staging);
    double sum = 0;
    norm_reset(s, staging);
    struct ticket ticket = {.slot = s->slot, .staging = (uint16_t)staging, .kind = TICKET_PUSH};
    crew_work(s, trained_chunks(s), sum_taken, &ticket);
    for (uint32_t chunk = 0; chunk < trained_chunks(s); chunk++)
        sum += sum_of_word(load_acquire(&sums_of(s, header)[chunk]));
    *finite_out = isfinite(sum) != 0;
    s->own.norm = sqrt(sum) * fabs((double)header->scale);
}
