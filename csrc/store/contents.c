/* contents.c: what a new segment holds at first: parameters, and from a state also optimizer states, step
 * counts, residuals and the view.
 */
#include <math.h>
#include <string.h>
#include <unistd.h>

#include "store/stores.h"

#define MAX_STEPS       0x1p39
#define ROUNDING        0x1p-40 /* of steps that were summed in another order */
#define MIN_WRITE_BYTES 16384u

/* Into memory that the file has already. Through the mapping, each new page would cost a page fault, which takes
 * longer than to write it through the file. */
static void put(const pyps_store *s, void *to, const void *from, size_t bytes) {
    ssize_t written = bytes < MIN_WRITE_BYTES ? 0 : pwrite(s->fd, from, bytes, (uint8_t *)to - s->base);
    size_t done = written > 0 ? (size_t)written : 0;
    memcpy((char *)to + done, (const char *)from + done, bytes - done);
}

typedef void put_run(const pyps_store *s, uint32_t chunk, uint64_t first, const float *from, uint64_t count,
                     uint32_t which);

/* A vector of the chunk's buffer; parameters that lie there as bf16 are rounded to nearest. */
static void put_in_chunk(const pyps_store *s, uint32_t chunk, uint64_t first, const float *from,
                         uint64_t count, uint32_t vector) {
    uint8_t halves[MIN_WRITE_BYTES];
    uint64_t piece = sizeof halves / 2;
    if (vector || !chunk_has_halves(s, chunk)) {
        put(s, buffer_floats(s, chunk, vector) + first, from, count * sizeof *from);
        return;
    }
    for (uint64_t done = 0; done < count; done += piece) {
        if (count - done < piece) piece = count - done;
        kernels_chosen()->narrow(halves, from + done, piece, NULL);
        put(s, buffer_halves(s, chunk) + 2 * (first + done), halves, 2 * piece);
    }
}

static void put_in_residual(const pyps_store *s, uint32_t chunk, uint64_t first, const float *from,
                            uint64_t count, uint32_t name) {
    put(s, residual_at(s, name) + (uint64_t)chunk * s->geometry.chunk_params + first, from,
        count * sizeof *from);
}

/* In pieces that do not cross a chunk. */
static void put_tensor(const pyps_store *s, const pyps_tensor *t, const float *from, put_run *run_to,
                       uint32_t which) {
    uint64_t whole = s->geometry.chunk_params;
    for (uint64_t done = 0; done < t->elements;) {
        uint64_t at = t->offset + done, left = t->elements - done;
        uint64_t room = whole - at % whole, run = left < room ? left : room;
        run_to(s, (uint32_t)(at / whole), at % whole, from + done, run, which);
        done += run;
    }
}

static int missing(const char *field, const pyps_tensor *t) {
    return fail(PYPS_EINVAL, "state: %s of tensor %s: found NULL; expected its values", field, t->name);
}

static int check(const pyps_store *s, const pyps_config *config, const pyps_state *state,
                 const pyps_tensor *tensors) {
    uint32_t count = s->geometry.tensors;
    if (state->optimizer != s->geometry.optimizer)
        return fail(PYPS_EINVAL, "state: optimizer: found %u; expected %u, the store's", state->optimizer,
                    s->geometry.optimizer);
    if (!config->initial || !state->steps || (s->layout.states && !state->vectors))
        return fail(PYPS_EINVAL,
                    "state: found NULL for initial, steps or vectors; expected one for each tensor");
    for (uint32_t t = 0; t < count; t++) {
        if (!tensors[t].elements) continue;
        bool averaged = tensors[t].kind == PYPS_AVERAGED;
        if (!config->initial[t]) return missing("parameters", &tensors[t]);
        for (uint32_t k = 0; !averaged && k < s->layout.states; k++)
            if (!state->vectors[k * count + t]) return missing("state vector", &tensors[t]);
        if (!(state->steps[t] >= 0 && state->steps[t] <= MAX_STEPS))
            return fail(PYPS_EINVAL, "state: steps of tensor %s: found %g; expected 0 to 2^39",
                        tensors[t].name, state->steps[t]);
    }
    return PYPS_OK;
}

/* Chunks count steps, so tensors that share a chunk must have taken the same number. */
static int put_steps(const pyps_store *s, const pyps_state *state, const pyps_tensor *tensors,
                     const struct view *v) {
    for (uint32_t c = 0; c < s->geometry.chunks; c++)
        *buffer_header(s, c) = (struct chunk_header){
            .steps = -1, .hyper = state->hyper ? state->hyper[s->chunks[c].group] : (pyps_hyper){0}};
    for (uint32_t t = 0; t < s->geometry.tensors; t++) {
        if (!tensors[t].elements) continue;
        uint64_t whole = s->geometry.chunk_params, end = tensors[t].offset + tensors[t].elements - 1;
        for (uint64_t c = tensors[t].offset / whole; c <= end / whole; c++) {
            double *steps = &buffer_header(s, (uint32_t)c)->steps;
            if (*steps >= 0 && fabs(*steps - state->steps[t]) > ROUNDING * *steps)
                return fail(
                    PYPS_EINVAL,
                    "state: steps of tensor %s: found %.17g; expected %.17g, as of the tensor before it "
                    "in its group",
                    tensors[t].name, state->steps[t], *steps);
            *steps = state->steps[t];
        }
    }
    for (uint32_t c = 0; c < s->geometry.chunks; c++) {
        struct chunk_header *header = buffer_header(s, c);
        header->before = header->steps - v->steps;
    }
    return PYPS_OK;
}

/* The residual of rank r goes to slot r, where the rank's first worker finds it, or takes it from. */
static int put_residual(pyps_store *s, const pyps_state *state, uint32_t rank, const pyps_tensor *tensors,
                        struct view *v) {
    uint32_t name = 1 + RESIDUALS_A_SLOT * rank, count = s->geometry.tensors;
    int rc = residual_allocate(s, name);
    for (uint32_t t = 0; t < count && !rc; t++) {
        const float *from = state->residuals ? state->residuals[rank * count + t] : NULL;
        if (!tensors[t].elements || tensors[t].kind == PYPS_AVERAGED) continue;
        if (!from) return missing("residual", &tensors[t]);
        put_tensor(s, &tensors[t], from, put_in_residual, name);
    }
    view_rank(v, rank)->residual = view_rank(v, rank)->version_residual = name;
    return rc;
}

int contents_write(pyps_store *s, const pyps_config *config, const pyps_state *state,
                   const pyps_tensor *tensors, struct view *v) {
    uint32_t count = s->geometry.tensors;
    int rc = state ? check(s, config, state, tensors) : PYPS_OK;
    if (rc || (state && ((rc = view_restore(v, state)) || (rc = put_steps(s, state, tensors, v))))) return rc;
    for (uint32_t c = 0; c < s->geometry.chunks; c++) store_relaxed(&s->words[c], word_make(v->version, c));
    for (uint32_t t = 0; t < count; t++) {
        if (config->initial && config->initial[t])
            put_tensor(s, &tensors[t], config->initial[t], put_in_chunk, 0);
        for (uint32_t k = 0; state && k < s->layout.states && tensors[t].kind != PYPS_AVERAGED; k++)
            put_tensor(s, &tensors[t], state->vectors[k * count + t], put_in_chunk, 1 + k);
    }
    for (uint32_t r = 0; state && r < state->ranks && r < s->geometry.ranks && !rc; r++)
        if (state->rank[r].has_residual) rc = put_residual(s, state, r, tensors, v);
    return rc;
}
