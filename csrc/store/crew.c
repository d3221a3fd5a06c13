/* crew.c: threads of a worker's process that share the chunks of its calls.
 *
 * A hand is a handle with a slot, hazards and spares of its own, and without a member in the view. To the protocol it is
 * one more participant that applies tickets, so nothing here can lose or double a push. It borrows the worker's
 * mapping: a crew ends before that changes (participant.c).
 *
 * A call takes one chunk after another from `next`, and so does every hand. It returns when all of them have: what its
 * caller gave is the caller's again, and a copy is whole. Hands without work sleep on the bell.
 */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "store/segment.h"

#ifndef LEAST_CHUNKS
#define LEAST_CHUNKS 8u /* of a job that wakes the crew: to wake a thread costs as much as one or two */
#endif

struct hand {
    pyps_store store;
    struct crew *crew;
    pthread_t thread;
    uint32_t heard; /* calls that it has done with, or that were before it came */
};

struct crew {
    _Alignas(64) a32 next; /* chunk that is not taken yet */
    _Alignas(64) a32 bell; /* calls so far */
    a32 working;           /* hands that have not done with the present one */
    a32 failed;            /* one of them had an error */
    crew_job *job;         /* NULL: the end */
    const void *what;
    uint32_t count;
    struct hand *hands[MOST_THREADS - 1];
};

/* Its own slot and caches stay. All else that a job reads of its handle is the worker's at the time of the call. */
static void brief(const pyps_store *s, struct hand *hand, uint32_t number) {
    pyps_store *h = &hand->store;
    h->own = s->own, h->lookahead = s->lookahead, h->stream = s->stream;
    h->journal = s->journal, h->journal_file = s->journal_file;
    h->hand = number;
}

static void ring(struct crew *crew, crew_job *job, const void *what) {
    crew->job = job, crew->what = what;
    store32_release(&crew->next, 0), store32_release(&crew->failed, 0);
    store32_release(&crew->working, crew->count);
    add32_seq(&crew->bell, 1);
    wait_wake_all(&crew->bell);
}

static void wait_for_hands(const struct crew *crew) {
    for (uint32_t left; (left = load32_acquire(&crew->working));)
        wait_on_word(&crew->working, left, WAIT_SLICE_NANOSECONDS);
}

int crew_work(pyps_store *s, uint32_t chunks, crew_job *job, const void *what) {
    struct crew *crew = s->crew;
    a32 alone = 0;
    if (!crew || chunks < LEAST_CHUNKS) return job(s, &alone, what);
    for (uint32_t i = 0; i < crew->count; i++) brief(s, crew->hands[i], i + 1);
    s->hands = crew->count + 1;
    ring(crew, job, what);
    int rc = job(s, &crew->next, what);
    wait_for_hands(crew);
    s->hands = 1;
    return rc || !load32_acquire(&crew->failed) ? rc : job(s, &alone, what);
}

static void *serve(void *argument) {
    struct hand *hand = argument;
    struct crew *crew = hand->crew;
    for (;; hand->heard++) {
        while (load32_acquire(&crew->bell) == hand->heard) wait_on_word(&crew->bell, hand->heard, UINT64_MAX);
        if (!crew->job) return NULL;
        hand->store.hands = crew->count + 1;
        if (crew->job(&hand->store, &crew->next, crew->what)) store32_release(&crew->failed, 1);
        kernels_chosen()->copied();
        if (sub32_seq(&crew->working, 1) == 1) wait_wake_all(&crew->working);
    }
}

/* Signals are the caller's threads' to take. */
static int start(struct hand *hand) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&hand->thread, NULL, serve, hand);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error ? fail(PYPS_ESYS, "starting a thread: error %d", error) : PYPS_OK;
}

/* With a file description of its own, and so locks of its own. */
static int open_again(const pyps_store *s) {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", s->fd);
    return open(path, O_RDWR | O_CLOEXEC);
}

static void forget(struct hand *hand) {
    pyps_store *h = &hand->store;
    handle_end(h);
    free(h->sources), free(h->draft), free(h->chunk_floats), free(hand);
}

static struct hand *new_hand(pyps_store *s) {
    struct hand *hand = malloc(sizeof *hand);
    if (!hand) return NULL;
    *hand = (struct hand){.store = *s, .crew = s->crew, .heard = load32_acquire(&s->crew->bell)};
    pyps_store *h = &hand->store;
    h->helps = s, h->crew = NULL, h->chunk_floats = NULL, h->begun = NULL, h->reading = NULL;
    h->slot = h->private_view = h->private_buffer = h->reclaims = NONE;
    h->ticket.number = h->norm_ticket = 0, h->journal = -1, h->drafted = false;
    for (size_t i = 0; i < sizeof h->free_cache / sizeof *h->free_cache; i++) h->free_cache[i] = NONE;
    h->sources = calloc(s->geometry.max_participants, sizeof *h->sources);
    h->draft = malloc(view_bytes(s->geometry.max_participants, s->geometry.staging_buffers));
    segment_hold_forks();
    h->fd = open_again(s);
    if (h->fd >= 0) handle_list(h);
    segment_release_forks();
    if (h->sources && h->draft && h->fd >= 0) return hand;
    forget(hand);
    return NULL;
}

static struct crew *new_crew(void) {
    struct crew *crew = aligned_alloc(_Alignof(struct crew), sizeof *crew);
    if (crew) memset(crew, 0, sizeof *crew);
    return crew;
}

int crew_add(pyps_store *s, int (*take_slot)(pyps_store *), void (*leave_slot)(pyps_store *)) {
    if (!s->crew && !(s->crew = new_crew())) return fail(PYPS_ENOSPC, "out of memory for threads");
    struct crew *crew = s->crew;
    struct hand *hand = new_hand(s);
    if (!hand) return fail(PYPS_ENOSPC, "no memory or no descriptor for a thread");
    int rc = take_slot(&hand->store);
    if (!rc && (rc = start(hand))) leave_slot(&hand->store);
    if (rc) forget(hand);
    else crew->hands[crew->count++] = hand;
    return rc;
}

uint32_t crew_threads(const pyps_store *s) { return s->crew ? s->crew->count + 1 : 1; }

void crew_end(pyps_store *s, void (*leave_slot)(pyps_store *)) {
    struct crew *crew = s->crew;
    if (!crew) return;
    ring(crew, NULL, NULL);
    for (uint32_t i = 0; i < crew->count; i++) {
        struct hand *hand = crew->hands[i];
        pthread_join(hand->thread, NULL);
        if (leave_slot) leave_slot(&hand->store);
        forget(hand);
        FAILPOINT("crew.ending");
    }
    free(crew);
    s->crew = NULL;
}
