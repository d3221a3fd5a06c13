/* snapshot.c: everything of exactly one version, while pushes continue: a strict snapshot has parameters and
 * optimizer states, a state also residuals and the view.
 *
 * The event that begins a snapshot names a version. Pushers save the buffers of that version that they
 * displace (apply.c), and workers write their residuals elsewhere (encoded.c), until the reader has copied
 * them or the snapshot ends.
 */
#include <stdlib.h>
#include <string.h>

#include "store/pull.h"

/* What a read shows, and what its visitor said last. */
struct show {
    const pyps_range *ranges; /* [count] */
    uint64_t count;
    pyps_visitor visit;
    void *context;
    int said;
};

struct target {
    struct show *show; /* NULL: the chunks are copied */
    float *flat;
    float *const *state;
    double *steps;     /* [chunks] */
    pyps_hyper *hyper; /* [groups] */
    uint64_t snapshot, version;
    double taken;
};

static bool next_shown(const pyps_store *s, uint32_t chunk, uint64_t at, const struct show *show,
                       struct run *run) {
    uint64_t end = (uint64_t)chunk * s->geometry.chunk_params + s->chunks[chunk].length;
    if (show->ranges) return ranges_next(show->ranges, show->count, at, end, run);
    *run = (struct run){at, end};
    return at < end;
}

static int show_chunk(pyps_store *s, uint32_t chunk, uint32_t buffer, struct show *show) {
    uint64_t first = (uint64_t)chunk * s->geometry.chunk_params, at = first;
    const float *params = chunk_params(s, chunk, buffer);
    if (!params) return PYPS_ENOSPC;
    for (struct run run; !show->said && next_shown(s, chunk, at, show, &run); at = run.end)
        show->said = show->visit(show->context, run.first, params + (run.first - first), run.end - run.first);
    FAILPOINT("snapshot.shown");
    return PYPS_OK;
}

static int copy_chunk(pyps_store *s, uint32_t chunk, uint32_t buffer, const struct target *to) {
    if (to->show) return show_chunk(s, chunk, buffer, to->show);
    chunk_copy(s, chunk, buffer, 0, to->flat);
    for (uint32_t vector = 1; to->state && vector <= s->layout.states; vector++)
        chunk_copy(s, chunk, buffer, vector, to->state[vector - 1]);
    if (to->steps) to->steps[chunk] = buffer_header(s, buffer)->before + to->taken;
    if (to->hyper) to->hyper[s->chunks[chunk].group] = buffer_header(s, buffer)->hyper;
    FAILPOINT("snapshot.copied");
    return PYPS_OK;
}

/* Copies the buffer that a pusher saved. It is pinned first, and then the snapshot is seen to be still alive:
 * from then on a cancel cannot take the buffer away. */
static int copy_saved(pyps_store *s, uint32_t chunk, const struct target *to) {
    uint64_t saved = load_acquire(&s->saved[chunk]);
    uint32_t buffer = word_buffer(saved);
    if (saved_snapshot(saved) != to->snapshot || saved_state(saved) != SAVED_BUFFER ||
        buffer >= s->layout.buffer_count)
        return fail(PYPS_ESTALE, "snapshot at version %lu: cancelled", to->version);
    FAILPOINT("snapshot.found");
    store_seq(&s->slots[s->slot].chunk_hazard, buffer + UINT64_C(1));
    int rc = view_load_snapshot(s);
    if (!rc && (!s->snapshot_active || s->snapshot != to->snapshot))
        rc = fail(PYPS_ESTALE,
                  "snapshot at version %lu: cancelled, because it delayed pushes or another snapshot",
                  to->version);
    if (!rc) rc = copy_chunk(s, chunk, buffer, to);
    chunk_unpin(s);
    return rc;
}

static int copy_present(pyps_store *s, uint32_t chunk, const struct target *to, bool *done) {
    uint64_t word;
    int rc = chunk_advance(s, chunk, to->version);
    if (rc || (rc = chunk_pin(s, chunk, &word))) return rc;
    *done = word_version(word) == to->version;
    if (*done) rc = copy_chunk(s, chunk, word_buffer(word), to);
    chunk_unpin(s);
    return rc;
}

static bool chunk_needed(const pyps_store *s, uint32_t chunk, const struct target *to) {
    struct run run;
    return !to->show || next_shown(s, chunk, (uint64_t)chunk * s->geometry.chunk_params, to->show, &run);
}

static int snapshot_chunk(pyps_store *s, uint32_t chunk, const struct target *to) {
    bool done = !chunk_needed(s, chunk, to);
    int rc = done ? PYPS_OK : copy_present(s, chunk, to, &done);
    if (!rc && !done) rc = copy_saved(s, chunk, to);
    if (rc) return rc;
    /* DONE: pushers need not save, and a saved buffer is free. The mark of a later snapshot stays. */
    uint64_t saved = load_acquire(&s->saved[chunk]);
    while (saved_snapshot(saved) <= to->snapshot &&
           !cas_seq(&s->saved[chunk], saved, saved_make(to->snapshot, SAVED_DONE, 0)))
        saved = load_acquire(&s->saved[chunk]);
    return PYPS_OK;
}

static int copy_chunks(pyps_store *s, const struct target *to) {
    int rc = PYPS_OK;
    s->ticket.number = 0; /* the cached view is older than this snapshot */
    for (uint32_t chunk = 0; chunk < s->geometry.chunks && !rc; chunk++) {
        rc = snapshot_chunk(s, chunk, to);
        if (!rc && to->show) rc = to->show->said;
    }
    kernels_chosen()->copied();
    return rc;
}

static int begin(pyps_store *s, double timeout_seconds, bool holds_residuals, struct outcome *outcome) {
    struct event e = store_event(s, EVENT_SNAPSHOT_BEGIN);
    e.holds_residuals = holds_residuals;
    uint64_t waited;
    return view_commit_waiting(s, &e, PYPS_WAITS_NOT, store_deadline(s, timeout_seconds), outcome, &waited);
}

/* Begins a snapshot, takes it to a target, and ends it. */
static int take(pyps_store *s, struct target *to, double timeout_seconds, uint64_t *version_out) {
    struct outcome outcome;
    int rc = begin(s, timeout_seconds, false, &outcome);
    if (rc) return rc;
    FAILPOINT("snapshot.begun");
    to->snapshot = outcome.snapshot, to->version = outcome.version, to->taken = outcome.steps;
    rc = copy_chunks(s, to);
    int ended = snapshot_end(s, EVENT_SNAPSHOT_END, outcome.snapshot);
    *version_out = outcome.version;
    return rc ? rc : ended;
}

int pyps_snapshot(pyps_store *s, float *flat, float *const *state, double *steps, double timeout_seconds,
                  uint64_t *version_out) {
    int rc = store_check_usable(s, true);
    if (rc || (rc = require(flat)) || (rc = require(version_out))) return rc;
    struct target to = {.flat = flat, .state = state, .steps = steps};
    return take(s, &to, timeout_seconds, version_out);
}

int pyps_read(pyps_store *s, const pyps_range *ranges, uint64_t count, pyps_visitor visit, void *context,
              double timeout_seconds, uint64_t *version_out) {
    int rc = store_check_usable(s, true);
    if (!visit) rc = rc ? rc : fail(PYPS_EINVAL, "visit: found NULL; expected a function");
    if (rc || (rc = require(version_out)) || (ranges && (rc = ranges_check(s, "read", ranges, count))))
        return rc;
    struct show show = {.ranges = ranges, .count = count, .visit = visit, .context = context};
    struct target to = {.show = &show};
    return take(s, &to, timeout_seconds, version_out);
}

/* ---- states ---- */

static struct reading *reading_allocate(const pyps_store *s) {
    uint32_t ranks = s->geometry.max_participants, ranges = view_state_ranges(s->expected);
    struct reading *r =
        calloc(1, sizeof *r + ranks * (sizeof *r->ranks + sizeof *r->residuals) + ranges * sizeof *r->ranges);
    if (!r) return NULL;
    r->ranks = (pyps_rank_state *)(r + 1);
    r->ranges = (pyps_range *)(r->ranks + ranks);
    r->residuals = (uint32_t *)(r->ranges + ranges);
    return r;
}

static int begin_reading(pyps_store *s, double timeout_seconds, struct view *begun, pyps_state *out) {
    struct reading *r = s->reading;
    struct outcome outcome;
    s->begun = begun;
    int rc = begin(s, timeout_seconds, true, &outcome);
    s->begun = NULL;
    if (rc) return rc;
    FAILPOINT("state.begun");
    r->snapshot = outcome.snapshot, r->version = outcome.version, r->taken = outcome.steps;
    for (uint32_t rank = 0; rank < begun->ranks; rank++)
        r->residuals[rank] = view_rank(begun, rank)->held_residual;
    if ((rc = view_capture(begun, out, r->ranks, r->ranges)))
        snapshot_end(s, EVENT_SNAPSHOT_END, r->snapshot);
    out->optimizer = s->geometry.optimizer;
    out->chunk_params = s->geometry.chunk_params;
    out->master = s->geometry.master, out->rounding_seed = s->geometry.rounding_seed;
    out->round_timeout_seconds = (double)s->geometry.round_timeout_nanoseconds / 1e9;
    return rc;
}

int pyps_state_begin(pyps_store *s, double timeout_seconds, pyps_state *out) {
    int rc = store_check_usable(s, true);
    if (rc || (rc = require(out))) return rc;
    if (s->reading) return fail(PYPS_EINVAL, "state: begun already; end that one first");
    struct view *begun = view_allocate(s);
    s->reading = reading_allocate(s);
    if (!begun || !s->reading)
        rc = fail(PYPS_ENOSPC, "out of memory for a state of %u ranks", s->geometry.max_participants);
    else rc = begin_reading(s, timeout_seconds, begun, out);
    free(begun);
    if (rc) reading_drop(s);
    return rc;
}

static int check_reading(pyps_store *s) {
    int rc = store_check_usable(s, true);
    return rc || s->reading ? rc : fail(PYPS_EINVAL, "state: not begun");
}

/* A tensor lies in chunks of one group, which have taken every step together. */
static void steps_of_tensors(const pyps_store *s, const double *chunks, double *steps) {
    for (uint32_t t = 0; t < s->geometry.tensors; t++) {
        uint64_t chunk = s->tensors[t].offset / s->geometry.chunk_params;
        steps[t] = chunk < s->geometry.chunks ? chunks[chunk] : 0;
    }
}

int pyps_state_read(pyps_store *s, float *flat, float *const *state, double *steps, pyps_hyper *hyper) {
    int rc = check_reading(s);
    if (rc) return rc;
    if (!flat) return fail(PYPS_EINVAL, "state: flat: found NULL; expected flat_elements floats");
    double *chunks = calloc(s->geometry.chunks, sizeof *chunks);
    if (!chunks) return fail(PYPS_ENOSPC, "out of memory for %u step counts", s->geometry.chunks);
    if (hyper) memset(hyper, 0, s->geometry.groups * sizeof *hyper);
    struct target to = {.flat = flat,
                        .state = state,
                        .steps = chunks,
                        .hyper = hyper,
                        .snapshot = s->reading->snapshot,
                        .version = s->reading->version,
                        .taken = s->reading->taken};
    rc = copy_chunks(s, &to);
    if (!rc && steps) steps_of_tensors(s, chunks, steps);
    free(chunks);
    return rc;
}

/* The hazard is set, and then the snapshot is seen to be alive: until the hazard is cleared no worker writes
 * there. */
int pyps_state_residual(pyps_store *s, uint32_t rank, float *flat) {
    int rc = check_reading(s);
    if (rc) return rc;
    if (rank >= s->geometry.max_participants || !s->reading->residuals[rank] || !flat)
        return fail(PYPS_EINVAL,
                    "state: rank: found %u; expected one that has a residual, and where to put it", rank);
    a64 *hazard = &s->slots[s->slot].residual_hazard;
    store_seq(hazard, s->reading->residuals[rank]); /* R1; R2 is the load of the view */
    FAILPOINT("state.hazard");
    rc = view_load_snapshot(s);
    if (!rc && (!s->snapshot_active || s->snapshot != s->reading->snapshot))
        rc = fail(PYPS_ESTALE, "state at version %lu: cancelled, because it delayed pushes or another one",
                  s->reading->version);
    const float *from = rc ? NULL : residual_at(s, s->reading->residuals[rank]);
    for (uint32_t chunk = 0; chunk < s->geometry.chunks && !rc; chunk++)
        chunk_put(s, chunk, from + (uint64_t)chunk * s->geometry.chunk_params, flat);
    kernels_chosen()->copied();
    store_release(hazard, 0);
    return rc;
}

int pyps_state_end(pyps_store *s) {
    int rc = check_reading(s);
    if (rc) return rc;
    rc = snapshot_end(s, EVENT_SNAPSHOT_END, s->reading->snapshot);
    reading_drop(s);
    return rc;
}
