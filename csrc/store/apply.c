/* apply.c: takes a chunk from one version to the next, by applying an admitted ticket. The first participant
 * that gets there publishes it.
 *
 *   word at k - 1 --hazard--> old buffer + staging of ticket k --kernel--> private spare --CAS--> word at k
 */
#include <string.h>

#include "store/apply.h"

#define SPAN (16u * BLOCK) /* what is done again where a value is to be mended */

/* What a ticket does to a chunk, the same on all of its runs. */
struct chunk_step {
    uint32_t chunk, old;
    const pyps_hyper *hyper; /* of its group */
    struct step_constants constants;
    bool exchanged; /* new parameters go to an exchange's copy too: */
    bool streams;   /* by the step itself */
};

static struct step step_on(const pyps_store *s, const struct chunk_step *c, uint32_t from, uint32_t length) {
    struct step step = {.length = length};
    for (uint32_t vector = 0; vector <= chunk_states(s, c->chunk); vector++) {
        step.old[vector] = buffer_floats(s, c->old, vector) + from;
        step.new[vector] = buffer_floats(s, s->private_buffer, vector) + from;
    }
    return step;
}

/* The optimizer's step; false: a value of the gradient was not finite. Parameters that lie as bf16 take it as floats
 * and are rounded after it. */
static bool take_step(const pyps_store *s, const struct chunk_step *c, struct step *step, uint64_t at,
                      uint32_t from) {
    float new[BLOCK];
    bool halves = chunk_has_halves(s, c->chunk);
    if (halves) step->new[0] = new;
    bool sound = kernels_chosen()->update[s->geometry.optimizer](step, &c->constants);
    const struct rounding how = {s->geometry.rounding_seed, s->ticket.number, at};
    if (halves)
        kernels_chosen()->narrow(buffer_halves(s, s->private_buffer) + 2 * (size_t)from, new, step->length,
                                 &how);
    return sound;
}

/* The optimizer's step on [from, end): at most a block, unless nothing of it goes through one. */
static bool step_block(const pyps_store *s, const struct chunk_step *c, uint32_t codec, uint64_t from,
                       uint64_t end) {
    float gradient[BLOCK], params[BLOCK];
    uint32_t slot = s->ticket.slot, staging = s->ticket.staging; /* of a push */
    uint32_t offset = (uint32_t)(from - (uint64_t)c->chunk * s->geometry.chunk_params);
    struct step step = step_on(s, c, offset, (uint32_t)(end - from));
    if (chunk_has_halves(s, c->chunk))
        step.old[0] = buffer_params(s, c->chunk, c->old, offset, (uint32_t)(end - from), params);
    step.gradient = s->ticket.kind == TICKET_ROUND
                        ? ticket_gradient(s, from, step.length, gradient)
                        : staging_gradient(s, slot, staging, codec, from, step.length, gradient);
    step.copy = c->streams ? s->stream.to + from : NULL;
    return take_step(s, c, &step, from, offset);
}

/* The optimizer's step on a run of a trained chunk. Of a gradient that may have to be mended, a span takes the step as
 * it is, and takes it again in mended blocks if the step found values that are not finite. */
static void trained_step(const pyps_store *s, const struct chunk_step *c, struct run run) {
    bool round = s->ticket.kind == TICKET_ROUND;
    /* read once: its owner may be hostile */
    uint32_t codec = round ? PYPS_F32 : staging_codec(s, s->ticket.slot, s->ticket.staging);
    bool whole = !round && !chunk_has_halves(s, c->chunk);
    bool mends = whole && codec >= CODECS;
    uint64_t longest = mends ? SPAN : whole && codec == PYPS_F32 ? run.end - run.first : BLOCK;
    for (uint64_t from = run.first, end; from < run.end; from = end) {
        end = run.end - from < longest ? run.end : from + longest;
        if (step_block(s, c, mends ? PYPS_F32 : codec, from, end) || !mends) continue;
        for (uint64_t at = from; at < end; at += BLOCK)
            step_block(s, c, codec, at, end - at < BLOCK ? end : at + BLOCK);
    }
}

static void step_run(const pyps_store *s, const struct chunk_step *c, struct run run) {
    uint64_t from = run.first - (uint64_t)c->chunk * s->geometry.chunk_params;
    if (!s->chunks[c->chunk].averaged) {
        trained_step(s, c, run);
        return;
    }
    struct step step = step_on(s, c, (uint32_t)from, (uint32_t)(run.end - run.first));
    step.copy = c->streams ? s->stream.to + run.first : NULL;
    averaged_step(s, &step, c->hyper->lr, run.first);
}

/* What is in no run of the ticket stays as it is. */
static void keep(const pyps_store *s, const struct chunk_step *c, uint64_t first, uint64_t end) {
    uint64_t from = first - (uint64_t)c->chunk * s->geometry.chunk_params;
    size_t length = first < end ? (size_t)(end - first) : 0;
    bool halves = chunk_has_halves(s, c->chunk);
    if (halves)
        memcpy(buffer_halves(s, s->private_buffer) + 2 * from, buffer_halves(s, c->old) + 2 * from,
               2 * length);
    for (uint32_t vector = halves; vector <= chunk_states(s, c->chunk); vector++)
        memcpy(buffer_floats(s, s->private_buffer, vector) + from, buffer_floats(s, c->old, vector) + from,
               4 * length);
}

static struct chunk_step chunk_step(const pyps_store *s, uint32_t chunk, uint32_t old,
                                    const struct chunk_header *next) {
    const struct ticket *ticket = &s->ticket;
    const struct staging_header *staged = ticket_constants(s);
    struct chunk_step c = {.chunk = chunk, .old = old, .hyper = &staged->hyper[s->chunks[chunk].group]};
    float scale = ticket->kind == TICKET_ROUND ? 1.0f : staged->scale * ticket->scale;
    if (next->hyper.clip_norm > 0) scale *= norm_factor(s->norm, next->hyper.clip_norm);
    c.exchanged = s->stream.to && ticket->number == s->stream.ticket && !ticket_is_ranged(s);
    c.streams = c.exchanged && !chunk_has_halves(s, chunk);
    c.constants = kernels_constants(s->geometry.optimizer, &next->hyper, scale, next->before + ticket->before,
                                    ticket->part);
    if (c.streams)
        c.constants.ahead = kernels_ahead(s->geometry.optimizer, &next->hyper, next->steps, s->lookahead,
                                          s->policy->waits_for_round);
    if (s->own.ticket != ticket->number) c.constants.ahead.direct = 0;
    return c;
}

/* Fills the private buffer with the chunk's next version, and an exchange's copy with its parameters. Every
 * participant computes the same values. */
static void compute_next(const pyps_store *s, uint32_t chunk, uint32_t old) {
    const struct ticket *ticket = &s->ticket;
    uint64_t at = (uint64_t)chunk * s->geometry.chunk_params;
    uint32_t length = s->chunks[chunk].length;
    struct chunk_header next = {.before = buffer_header(s, old)->before};

    next.steps = next.before + (ticket->before + (double)ticket->part);
    if (!s->chunks[chunk].averaged) next.hyper = ticket_constants(s)->hyper[s->chunks[chunk].group];
    const fenv_t callers = kernels_enter();
    struct chunk_step c = chunk_step(s, chunk, old, &next);
    uint64_t done = at;
    for (struct run run; ticket_next_run(s, done, at + length, &run); done = run.end) {
        keep(s, &c, done, run.first);
        step_run(s, &c, run);
    }
    keep(s, &c, done, at + length);
    kernels_leave(&callers);
    *buffer_header(s, s->private_buffer) = next;
    if (!c.exchanged) return;
    if (!c.streams) chunk_look(s, chunk, s->private_buffer, s->stream.to);
    else memset(s->stream.to + at + length, 0, (s->geometry.chunk_params - length) * sizeof *s->stream.to);
    chunk_arrived(s, chunk, ticket->number);
}

/* If a snapshot has exactly the version that is about to be displaced, saves its buffer before the word
 * changes: a reader that sees the new word also sees the saved buffer. */
static void save_for_snapshot(pyps_store *s, uint32_t chunk, uint64_t word) {
    if (!s->snapshot_active || word_version(word) != s->snapshot_version) return;
    for (;;) { /* the CAS fails if another participant saved it, or marked an earlier snapshot */
        uint64_t saved = load_acquire(&s->saved[chunk]);
        if (saved_snapshot(saved) >= s->snapshot) return;
        FAILPOINT("apply.saving");
        if (cas_seq(&s->saved[chunk], saved, saved_make(s->snapshot, SAVED_BUFFER, word_buffer(word)))) break;
    }
    FAILPOINT("apply.saved");
}

/* The ticket changes nothing of the chunk. */
static int pass(pyps_store *s, uint32_t chunk, uint64_t word) {
    save_for_snapshot(s, chunk, word);
    FAILPOINT("apply.passing");
    if (cas_seq(&s->words[chunk], word, word_make(s->ticket.number, word_buffer(word)))) wake_progress(s);
    return PYPS_OK;
}

/* Both hazards are set and the word is at k - 1: ticket k is incomplete, so its staging cannot change. */
static int apply_pinned(pyps_store *s, uint32_t chunk, uint64_t word) {
    uint64_t at = (uint64_t)chunk * s->geometry.chunk_params;
    struct run run;
    if (!ticket_next_run(s, at, at + s->chunks[chunk].length, &run)) return pass(s, chunk, word);
    if (!s->chunks[chunk].averaged && ticket_constants(s)->hyper[s->chunks[chunk].group].clip_norm > 0)
        norm_of_ticket(s);
    int rc = buffer_claim(s, chunk);
    if (rc) return rc;
    FAILPOINT("apply.claimed");
    compute_next(s, chunk, word_buffer(word));
    FAILPOINT("apply.computed");
    save_for_snapshot(s, chunk, word);
    if (!cas_seq(&s->words[chunk], word, word_make(s->ticket.number, s->private_buffer))) return PYPS_OK;
    FAILPOINT("apply.published");
    buffer_published(s, word_buffer(word));
    wake_progress(s);
    return PYPS_OK;
}

static int apply(pyps_store *s, uint32_t chunk, uint64_t number) {
    int rc = view_load_ticket(s, number);
    if (rc) return rc;
    a64 *hazard = &s->slots[s->slot].ticket_hazard;
    uint64_t word;
    store_seq(hazard, number); /* R1; R2 is in chunk_pin */
    rc = chunk_pin(s, chunk, &word);
    if (!rc && word_version(word) == number - 1) rc = apply_pinned(s, chunk, word);
    chunk_unpin(s);
    store_release(hazard, 0); /* the staging has been read */
    return rc;
}

int chunk_advance(pyps_store *s, uint32_t chunk, uint64_t version) {
    uint32_t retries = 0;
    for (;;) {
        uint64_t have =
            word_version(load_seq(&s->words[chunk])); /* W1 of the buffer that its ticket stages */
        if (have >= version) return PYPS_OK;
        int rc = apply(s, chunk, have + 1);
        if (rc < 0) return rc;
        /* A ticket that left the ring is complete, so the chunk must have advanced meanwhile. */
        if (rc == TRY_AGAIN && word_version(load_acquire(&s->words[chunk])) == have && ++retries > 3)
            return fail(PYPS_ECORRUPT, "chunk %u: at version %lu, but the next ticket is gone", chunk, have);
    }
}

struct target {
    uint64_t version, others; /* others: up to that one, tickets that others apply */
};

static int follow_taken(pyps_store *s, a32 *next, const void *what) {
    const struct target *target = what;
    bool moving = true; /* the participants before us advance; after one stall we do not wait again */
    for (uint32_t chunk; (chunk = next32_relaxed(next)) < s->geometry.chunks;) {
        bool there = word_version(load_acquire(&s->words[chunk])) >= target->others;
        moving = there || (moving && wait_for_word(s, &s->words[chunk], word_make(target->others, 0)));
        int rc = chunk_advance(s, chunk, target->version);
        if (rc) return rc;
        arrivals_tell(s);
    }
    return PYPS_OK;
}

static uint32_t chunks_behind(const pyps_store *s, uint64_t version) {
    uint32_t behind = 0;
    for (uint32_t chunk = 0; s->crew && chunk < s->geometry.chunks; chunk++)
        behind += word_version(load_acquire(&s->words[chunk])) < version;
    return behind;
}

int chunks_follow(pyps_store *s, uint64_t version, uint64_t own) {
    struct target target = {version, own == version ? version - 1 : version};
    int rc = crew_work(s, chunks_behind(s, version), follow_taken, &target);
    if (!rc && s->complete_version < version) s->complete_version = version;
    return rc;
}

struct part {
    uint64_t version;
    uint32_t part, parts;
};

static int advance_taken(pyps_store *s, a32 *next, const void *what) {
    const struct part *of = what;
    int rc = PYPS_OK;
    for (uint32_t chunk; !rc && (chunk = of->part + of->parts * next32_relaxed(next)) < s->geometry.chunks;)
        if (!(rc = chunk_advance(s, chunk, of->version))) arrivals_tell(s);
    return rc;
}

int chunks_advance_part(pyps_store *s, uint64_t version, uint32_t part, uint32_t parts) {
    struct part of = {version, part, parts};
    return crew_work(s, s->geometry.chunks / parts, advance_taken, &of);
}

int chunks_complete(pyps_store *s, uint64_t version) {
    return s->complete_version >= version ? PYPS_OK : chunks_follow(s, version, 0);
}
