/* pyps.h: the public interface of the pyps parameter store.
 *
 * A store is one POSIX shared-memory segment that any number of processes map. It holds a flat fp32 parameter
 * vector (and optimizer state), cut in chunks, changed only by *pushes*. Every push that is admitted gets a
 * ticket, the store's next version. Every chunk applies tickets in order, each exactly once, even if the
 * process that pushed dies.
 *
 * Read what you need:
 *   1 Errors               codes, and what became of a push that failed
 *   2 A worker's step      join, start, pull, stage, push: all that a training loop calls
 *   3 More for workers     parts, codes, exchange, pipelines, micro-batches
 *   4 Reading a store      snapshot, read, pull and state side by side
 *   5 Creating a store     tensors, optimizer, policy; names of segments
 *   6 Watching a run       status, members, ranks, tickets, journal
 *   7 States               what a store goes on from, bit for bit
 *   8 Planning             costs, re-plans, turns
 *   9 Codecs               on arrays, without a store
 *  10 Policies             what each asks for, and one of the caller
 *  11 Simulation           the decisions of a store in virtual time
 *
 * Conventions.
 *   Errors    Functions return PYPS_OK (0) or a negative PYPS_E* code; pyps_error_message() then says to the
 *             calling thread what was found and what was expected.
 *   Handles   A handle belongs to one thread at a time and to the process that opened it: after fork() the
 *             child's copy refuses with PYPS_EFORKED. Only pyps_get_status, _members, _ranks, _hyper, _layout and
 *             _tensor may be called while another thread's call waits, but for join, leave and close.
 *   Times     Seconds. A negative timeout means twice the store's round_timeout_seconds: by then a worker
 *             that holds others up has been fenced.
 *   Structs   A struct that a caller fills and passes begins with `size`: set it to sizeof, so that later versions can
 *             grow it. What lies behind a smaller size counts as zeros; of a larger one, what this version does not
 *             know must be zeros. Elements of arrays, and structs within structs, have the size that this header
 *             gives them, in every version of one PYPS_ABI: pyps_range 16 bytes, pyps_turn 16, pyps_hyper 44,
 *             pyps_tensor 256, pyps_rank_state 192, pyps_policy_params 88; a `size` in one of them is not
 *             read, but for pyps_data_set.
 *   Pointers  Memory belongs to the caller unless said otherwise. NULL is an error (PYPS_EINVAL) unless said
 *             otherwise; so is a second close. No other function may get a handle that was closed, and no check
 *             is made of arrays' lengths.
 *   Files     A segment that another process truncates is an error of the next call (PYPS_ECORRUPT). During a
 *             call it is SIGBUS: the system says it in no other way.
 */
#ifndef PYPS_H
#define PYPS_H

#include <stddef.h>
#include <stdint.h>

#if defined(__cplusplus)
extern "C" {
#endif

#define PYPS_ABI      14
#define PYPS_ANY_PLAN UINT64_MAX /* of pyps_replan */
#define PYPS_API      __attribute__((visibility("default")))

/* cffi: begin */

/* ---- 1 Errors ---- */

enum {
    PYPS_OK = 0,
    PYPS_EINVAL = -1,   /* an argument is wrong */
    PYPS_ESYS = -2,     /* a system call failed; the message has its errno */
    PYPS_EEXIST = -3,   /* a segment of that name exists */
    PYPS_ENOENT = -4,   /* no segment of that name */
    PYPS_ENOSPC = -5,   /* the file system that holds segments is full */
    PYPS_ECORRUPT = -6, /* not a pyps segment, truncated, or damaged */
    PYPS_EABI = -7,     /* a caller or segment of another ABI, byte order or time namespace */
    PYPS_EPERM = -8,    /* another user's segment, or one that others may write */
    PYPS_EFULL = -9,    /* no free participant slot, rank or buffer */
    PYPS_ETIMEDOUT = -10,
    PYPS_EFENCED = -11,   /* this participant was too late and is fenced; rejoin */
    PYPS_ESTALE = -12,    /* the snapshot was cancelled so that pushes, or another snapshot, could continue */
    PYPS_EREJECTED = -13, /* the policy refused the push; the parameters are unchanged */
    PYPS_EFORKED = -14,   /* the handle belongs to another process */
    PYPS_ENOTREADY = -15, /* the segment is still being created */
    PYPS_EBUSY = -16,     /* a live process holds it */
    PYPS_EEND = -17,      /* every sample has been assigned and accounted for */
    PYPS_EPOLICY = -18,   /* the segment's policy is not known to this library */
    PYPS_ENONFINITE = -19, /* a value to encode is NaN or infinite, and `nonfinite` says to refuse */
    PYPS_EPLAN = -20,      /* the store's plan is another one than the re-plan was to replace */
    PYPS_EINTR = -21,      /* a wait was interrupted: see pyps_set_interrupt */
    PYPS_EFALSELOOK = -22  /* `looked` of a push names a gradient that is not finite */
};

/* What became of a push or an exchange that returned ...
 *
 *                     the gradient   the staging buffer   call again?
 *   PYPS_OK           is staged      the store's          stage, for the next gradient
 *   PYPS_EINVAL       is not         the caller's         yes, with what the message asks for
 *   PYPS_ENONFINITE   is not         the caller's         yes: mended, or with samples 0; or unstage
 *   PYPS_ENOSPC       is not         the caller's         yes, once there is room
 *   PYPS_EREJECTED    is dropped     the store's          no: its samples went back; start again
 *   PYPS_EFENCED      is not         the store's after    no: rejoin, then start again
 *                                    rejoin
 *   PYPS_ETIMEDOUT    see *result:
 *     admitted_nanoseconds is 0      the caller's         yes, with the same arguments: it waited for its turn
 *     admitted_nanoseconds is not    the store's until    yes, with the same `staging`: that waits on for the round
 *                                    the round closes     and stages nothing twice. Or leave, or start: it counts
 *   PYPS_EINTR        as PYPS_ETIMEDOUT
 *   PYPS_EFULL        as PYPS_ETIMEDOUT                   yes, when stopped processes have gone on or have ended
 *   PYPS_EFALSELOOK   counts, but    the store's          no: the caller has a fault. Start again
 *                     for a block
 *   PYPS_ECORRUPT, PYPS_ESYS         the handle is of no more use: close it
 *
 * "Staged" says that it counts once, whatever becomes of its worker. A refused gradient that lay in the staging buffer
 * is still there; one that was given by `gradient` may lie there in part. A push has no result where it is PYPS_EINVAL.
 */

PYPS_API uint32_t pyps_abi_version(void);
/* Calls that wait for others ask `check` about 20 times a second, and after every signal of their thread: 1 ends the
 * call with PYPS_EINTR. NULL: never. For the whole process. */
PYPS_API int pyps_set_interrupt(int (*check)(void));
PYPS_API const char *pyps_error_name(int code); /* "PYPS_EINVAL" ...; never NULL */
PYPS_API const char *pyps_error_message(void);  /* of this thread's last failure; valid until its next call */
PYPS_API int pyps_error_code(void);  /* the same failure's code: of a function that returned NULL */
PYPS_API const char *pyps_isa(void); /* the kernels in use: "scalar", "avx2", "avx512" or "neon" */

/* ---- 2 A worker's step ---- */

typedef struct pyps_store pyps_store;

/* Roles. A new worker's rank may be one that was not planned, below max_participants: the
 * store then has all ranks up to it. Such a rank rests until pyps_replan gives it samples. */
enum { PYPS_WORKER = 0, PYPS_OBSERVER = 1, PYPS_NEW_WORKER = 2 };
/* What a push does to a tensor. Trained: it takes the optimizer's step. Averaged (BatchNorm's running
 * statistics): what is staged is not a gradient but values, and the store's values move toward them: in a round
 * toward the workers' mean, weighted by samples, by its group's lr; by a push alone less, by its part of a global
 * batch. */
enum { PYPS_TRAINED = 0, PYPS_AVERAGED = 1 };

typedef struct {
    char name[160]; /* UTF-8, NUL-terminated, unique in the store */
    uint32_t dtype; /* PYPS_F32 */
    uint32_t group; /* index of its parameter group */
    uint32_t ndim;  /* at most 8 */
    uint32_t kind;  /* PYPS_TRAINED ...; one for a group, and averaged groups are the last ones */
    uint64_t shape[8];
    uint64_t offset;   /* out: first element in the flat vector */
    uint64_t elements; /* out: product of shape */
} pyps_tensor;

/* One parameter group's constants, carried by each push. They are those of a step of a global batch, and the
 * formulas those of torch. A push of a part of that takes this part of the step: see PYPS_SCALE_SAMPLES. */
typedef struct {
    float lr;
    float weight_decay; /* decoupled for AdamW, else L2 */
    float momentum;     /* this, beta1 and beta2: at least 0, below 1 */
    float dampening;
    float beta1;
    float beta2;
    float eps;
    float lr_decay;    /* Adagrad */
    float clip;        /* bound of each element of the scaled gradient, [-clip, clip]; 0: no bound */
    uint32_t nesterov; /* 0 or 1 */
    float clip_norm;   /* bound of the gradient's norm over all trained tensors; 0: no bound. Of a round the
                          norm is that of its mean gradient, of a push alone that of its own. The gradient is
                          scaled by min(1, clip_norm / (norm + 1e-6)), unless the norm is not finite */
} pyps_hyper;

typedef struct {
    uint64_t segment_bytes; /* size of the file, holes included */
    uint64_t flat_elements; /* length of the flat vector: chunks * chunk_params */
    uint64_t parameters;    /* elements of all tensors */
    uint32_t chunks, chunk_params, max_participants, staging_buffers, groups, tensors, ranks;
    uint32_t optimizer, policy, states; /* states: state vectors of the optimizer, 0 to 2 */
    uint32_t master;                    /* as in pyps_config */
    uint64_t averaged_elements;         /* the end of the flat vector, of averaged tensors */
    uint64_t samples;                   /* sample positions to assign in all; 0: without end */
    uint64_t plan, seed;                /* as in pyps_config */
} pyps_layout;

typedef struct {
    uint64_t first;            /* position of the first sample in the sequence of all epochs */
    uint32_t count;            /* samples to take: about the planned batch */
    uint32_t batch;            /* the planned batch */
    uint64_t round;            /* the round of this claim (synchronous policies), else the member's clock */
    uint64_t plan;             /* how many times the plan has changed */
    uint64_t wait_nanoseconds; /* how long this call waited */
    uint64_t version;          /* the store's, when this call returned the claim */
} pyps_claim;

/* Codecs: how gradients and parameters are encoded for transfer. Tensors are PYPS_F32. */
enum { PYPS_F32 = 0, PYPS_BF16 = 1, PYPS_F16 = 2, PYPS_INT8 = 3, PYPS_INT4 = 4, PYPS_NF4 = 5 };
enum { PYPS_NEAREST = 0, PYPS_STOCHASTIC = 1 }; /* rounding */
/* What is done with NaN and infinities: refuse, take their block as zeros, take them as zeros. A block of PYPS_F32 is of
 * 1024 values; with `ranges` blocks are counted from the beginning of each range, and of each chunk that it goes through,
 * not from that of the flat vector. Of averaged tensors such a value is refused, or leaves the store's as it is.
 * To refuse costs a read more of a gradient that lies in its staging buffer. */
enum { PYPS_NONFINITE_ERROR = 0, PYPS_NONFINITE_SKIP = 1, PYPS_NONFINITE_ZERO = 2 };

typedef struct {
    uint64_t first, count;
} pyps_range;

typedef struct {
    uint32_t size;
    uint32_t staging; /* the staging buffer that holds the mean gradient of the samples */
    uint32_t samples; /* how many samples it is the mean of; 0: skip this step */
    float scale;      /* the gradient is multiplied by it (e.g. 1 / loss scale); finite */
    double timeout_seconds;
    const pyps_hyper *hyper; /* [groups] of averaged ones only lr is read */
    const float *gradient;   /* [flat_elements] NULL: it is in the staging buffer */
    uint64_t seed;           /* of stochastic rounding; different for each push */
    uint32_t codec;          /* how it is encoded into the staging buffer */
    uint32_t rounding;       /* PYPS_NEAREST or PYPS_STOCHASTIC */
    uint32_t nonfinite;      /* PYPS_NONFINITE_ERROR ... */
    uint32_t error_feedback; /* 1: the encoding error is added to this rank's next gradient */
    uint32_t encoded;  /* 1: pyps_staging_codes() already holds it in this codec; scale still applies, and
                                averaged tensors are in the staging buffer. Codes that are not finite are refused,
                                whatever `nonfinite` says: halves are read for that, but where `looked` covers them */
    uint32_t weighted; /* 1: `weight` is the gradient's in its round's mean; 0: it is `samples` */
    double grad_norm_squared; /* for policies that need it: of the gradient; 0: not known */
    uint64_t base_version;    /* 1 + the version that the gradient was computed on; 0: the one pulled last */
    uint64_t compute_nanoseconds; /* that the gradient took; 0: the time since its claim */
    uint64_t
        position; /* of `hyper` in its schedule: a round takes the constants of the greatest, lowest rank */
    uint64_t cost_nanoseconds; /* that the step cost: compute and data; 0: what the gradient took */
    uint64_t data_nanoseconds; /* of these, for data */
    const pyps_range *ranges;  /* [range_count] the gradient is of these parts of the flat vector alone, in
                                  ascending order and apart, as PYPS_F32; `gradient` holds their values one after
                                  the other. NULL: of all of it */
    uint64_t range_count;
    uint64_t tag[2]; /* the caller's own name of this push: pyps_get_ticket tells it again */
    /* Of a part of a model whose decisions another store takes: what that store's ticket of this gradient was given, in
     * place of this store's; NULL: none. */
    const struct pyps_ticket *decided;
    /* [looked_count] parts of the flat vector, in ascending order and apart, where the caller has found every gradient in
     * the staging buffer to be finite: by pyps_finite while it was in cache, or on its device. A push that is to refuse
     * what is not finite reads the rest alone. It needs no saying, and is not read, where a gradient is copied, encoded here
     * or of ranges, where its norm is summed before it is admitted, and of averaged tensors. Policies whose pushes wait for no
     * round that they go into do not read it either. The optimizer's step notices where it was wrong. Then a block that is
     * not finite counts as zeros, as under PYPS_NONFINITE_SKIP, for every participant alike, and the push returns
     * PYPS_EFALSELOOK after all; but not of halves that came encoded. NULL: none. */
    const pyps_range *looked;
    uint64_t looked_count;
    /* What the gradient counts in its round's mean: the number that its loss was divided by, such as its targets or the sum
     * of their class weights. At least 0. Averaged tensors count by samples, and so does a push's part
     * of a global batch. */
    double weight;
} pyps_push_args;

typedef struct {
    uint64_t version;   /* the ticket; 0: all skipped the step, or its round has not closed */
    uint64_t staleness; /* versions admitted between this worker's pull and its push */
    uint64_t samples;   /* samples that went into the ticket */
    uint32_t sources;   /* gradients that went into the ticket */
    uint32_t reserved;
    uint64_t wait_nanoseconds;     /* how long this call waited for others */
    uint64_t nonfinite;            /* values that were NaN or infinite; of PYPS_F32 not counted */
    uint64_t blocks_skipped;       /* blocks that were sent as zeros because of them; the same */
    uint64_t admitted_nanoseconds; /* when the gradient was staged, by its machine's clock; 0: it was not */
    uint64_t rank_pushes;          /* of this worker's rank that were admitted, with this one */
    uint64_t saved_pushes;         /* of these, those in the last state that was read, or begun from */
} pyps_push_result;

/* abi: PYPS_ABI. PYPS_EABI, and nothing is written: the library is of another one than the caller's header. */
PYPS_API int pyps_open(const char *name, uint32_t abi, pyps_store **out);
PYPS_API int pyps_close(pyps_store *store); /* leaves first if joined; NULL is allowed */
PYPS_API int pyps_get_layout(pyps_store *store, pyps_layout *out);
PYPS_API int pyps_get_tensor(pyps_store *store, uint32_t index, pyps_tensor *out);

/* rank -1: the lowest rank that no live worker has. A dead worker's rank is inherited. */
PYPS_API int pyps_join(pyps_store *store, int role, int rank, int *rank_out);
PYPS_API int pyps_leave(pyps_store *store);
/* How many threads of this process a worker's calls may use, the caller's among them: 1, unless it is set, to 64. Before
 * or after joining; they last until leave, and come again at the next join. Pushes, pulls and exchanges of some hundred
 * thousand parameters or more share their chunks; the bits are the same with any number. Each thread but the caller's
 * sleeps between calls, blocks all signals, and takes one of max_participants for itself, of those past the ranks and
 * 8 more: *threads_out (NULL: not asked) says how many there are now. */
PYPS_API int pyps_set_threads(pyps_store *store, uint32_t threads, uint32_t *threads_out);
PYPS_API int pyps_rejoin(pyps_store *store); /* after PYPS_EFENCED: active again with the same rank */

/* start, pull, (compute), stage, push: all need a joined worker. A worker whose rank rests waits in start until it has
 * samples again. */
PYPS_API int pyps_start(pyps_store *store, double timeout_seconds, pyps_claim *out);
/* Copies the parameters. A worker gets them as momentum will have moved them when its gradient is admitted
 * (look-ahead), unless scaling is PYPS_SCALE_NONE, plain_pulls is set, or rounds wait for all and do not overlap. The
 * worker's own last gradient stands for those under way: write the next one after the pull. In rounds none does, and
 * the caller may go on along its own (Adam: along the mean, here). */
PYPS_API int pyps_pull(pyps_store *store, float *flat, uint64_t *version_out);
/* A staging buffer that no process reads any more, for flat_elements gradients. Its pointer stays valid until
 * leave; the buffer belongs to the caller until it is pushed. After leave the pointer leads to memory that only this
 * process sees, until close. A helper that is stopped while it reads a gradient keeps its buffer until it goes on or is
 * killed: a worker with b buffers waits, up to PYPS_ETIMEDOUT, only if that happens to b of its gradients. */
PYPS_API int pyps_stage(pyps_store *store, double timeout_seconds, uint32_t *staging_out);
PYPS_API float *pyps_staging(pyps_store *store,
                             uint32_t staging); /* NULL: not joined, out of range, no memory */
/* Gives back a staging buffer that will not be pushed, for example after its push was refused; PYPS_EINVAL if it is
 * not the caller's, or waits in a round. */
PYPS_API int pyps_unstage(pyps_store *store, uint32_t staging);
/* Admits the gradient, and completes its ticket; under policies with rounds waits for the round. *out is filled as far as
 * it is known, after a failure too. */
PYPS_API int pyps_push(pyps_store *store, const pyps_push_args *args, pyps_push_result *out);
/* PYPS_OK, or PYPS_ENONFINITE: a value is NaN or infinite. For `looked`, above; any thread may ask. */
PYPS_API int pyps_finite(const float *values, uint64_t count);
/* The same, and copies all of them, finite or not: each comes from memory once. */
PYPS_API int pyps_take(float *to, const float *from, uint64_t count);

/* ---- 3 More for workers ---- */

/* Where a part of the gradient goes, in a staging buffer of which only such parts need memory. NULL as above.
 * A push of `ranges` is a ticket like any other. Parameters and optimizer states outside of them stay as they are,
 * but the step counts there too: Adam's t is the store's. In a round each parameter takes the mean over the samples
 * of all gradients, where those that do not have it count as zeros; one that none of them has stays as it is. */
PYPS_API float *pyps_staging_range(pyps_store *store, uint32_t staging, pyps_range range);
/* The same of parts of the flat vector, in ascending order and apart: their values one after the other. Only their
 * chunks are read. */
PYPS_API int pyps_pull_ranges(pyps_store *store, const pyps_range *ranges, uint64_t count, float *values,
                              uint64_t *version_out);
/* Where to write an encoded gradient of n = flat_elements - averaged_elements values, with memory for `bytes`:
 * pyps_encoded_bytes(codec, n). NULL as above. */
PYPS_API void *pyps_staging_codes(pyps_store *store, uint32_t staging, uint64_t bytes);
/* A pull that encodes, to nearest, from the fp32 parameters; averaged tensors follow as they are. `bytes` is
 * pyps_encoded_bytes(codec, flat_elements - averaged_elements) + 4 * averaged_elements. PYPS_ENONFINITE if a
 * parameter is not finite. */
PYPS_API int pyps_pull_encoded(pyps_store *store, uint32_t codec, void *data, uint64_t bytes,
                               uint64_t *version_out);
/* A push and the pull after it in one pass over the parameters: `flat` as of *version_out, which is at least
 * out->version. After a failure `flat` may hold parts of both. */
PYPS_API int pyps_exchange(pyps_store *store, const pyps_push_args *args, float *flat, pyps_push_result *out,
                           uint64_t *version_out);
/* The same, and `arrived` is called, in this thread, whenever at least `least` further floats of `flat` are what they will
 * be, in ascending order; in the end of all that are left. So their way to a device begins while others are applied. It
 * must not call this handle. If it returns something else than 0, it is not called again; the exchange goes on to its
 * end, and returns that if it had no error. After an error what was told holds for some of `flat` and not for the rest. */
typedef int (*pyps_arrival)(void *context, uint64_t first, uint64_t count);
PYPS_API int pyps_exchange_arriving(pyps_store *store, const pyps_push_args *args, float *flat,
                                    uint64_t least, pyps_arrival arrived, void *context,
                                    pyps_push_result *out, uint64_t *version_out);
/* Claims the samples of the step after the last one claimed, for a worker that computes while its gradients
 * are sent. Claims that may follow the current one: staging_buffers - 1, and at least one.
 * Pushes belong to claims in the order of the claims. Never waits: count is 0 if there is nothing to claim
 * now; then push first, and start. `after`: `first` of the last claim that the caller has, so that a call whose
 * result a signal took away gives it again; UINT64_MAX: what was given last. PYPS_EINVAL without allows_pipeline. */
PYPS_API int pyps_start_ahead(pyps_store *store, uint64_t after, pyps_claim *out);

enum { PYPS_CONTINUE = 0, PYPS_PUSH_NOW = 1, PYPS_ABORT = 2 }; /* what pyps_should_continue advises */
/* Between two micro-batches: `done` samples of the claim are computed, the next micro-batch has `next`. The
 * advice is to continue, to push what there is, or to abort: the samples go back; start again. */
PYPS_API int pyps_should_continue(pyps_store *store, uint32_t done, uint32_t next, int *advice_out);
/* Under a policy with turns: waits until this worker's push may be sent. A push waits for its turn in any case;
 * a caller that sends the gradient over a link calls this before, so that the link carries one at a time. */
PYPS_API int pyps_await_turn(pyps_store *store, double timeout_seconds);
/* Limits this worker's claims to the samples that its memory holds, from the next claim on; 0: no limit. */
PYPS_API int pyps_set_max_samples(pyps_store *store, uint32_t samples);

/* Says which data set this worker reads; PYPS_EINVAL names the rank that has another one. */
typedef struct {
    uint32_t size; /* of this struct */
    uint32_t reserved;
    uint64_t length;  /* samples of an epoch; 0: a stream */
    uint64_t digest;  /* of all that must be equal; 0: nothing */
    double mean;      /* of some of its values ... */
    double tolerance; /* ... known to within this */
} pyps_data_set;
PYPS_API int pyps_set_data_set(pyps_store *store, const pyps_data_set *data);

/* An admitted push that became a version by itself. */
typedef struct pyps_ticket {
    uint32_t size;
    float part; /* of an optimizer step, that it takes */
    uint64_t version;
    uint64_t tag[2];  /* as in pyps_push_args */
    uint64_t samples; /* of its gradient */
    float scale;      /* the policy's, of the gradient */
    float share;      /* of averaged tensors' way from the store's values to the gradient's */
} pyps_ticket;
/* What the push that became a version was given. Kept of the last max_participants * staging_buffers versions;
 * PYPS_EINVAL: it is older, or to come, or a round of several pushes. */
PYPS_API int pyps_get_ticket(pyps_store *store, uint64_t version, pyps_ticket *out);

/* ---- 4 Reading a store ---- */

/* What each copies, and of which version. None of them makes a push wait.
 *
 *   pyps_pull           parameters                   each chunk whole; *version_out is the oldest chunk's. Of a worker
 *                                                    between two pushes of its own under bsp: one version
 *   pyps_pull_ranges    parts of them                the same, of the chunks that they lie in
 *   pyps_pull_encoded   parameters, as codes         the same
 *   pyps_exchange       parameters                   the same, and at least that of its push
 *   pyps_read           none: shows them in place    exactly one
 *   pyps_snapshot       parameters, states, steps    exactly one
 *   pyps_state_begin .. the same, residuals, and     exactly one
 *            _end       what the view knows
 *
 * The first four cost their copy, 8 bytes of traffic a parameter, and need nothing else. The last three may be taken by an
 * observer, one at a time: the next one waits, and cancels one that has lasted for the round timeout (PYPS_ESTALE). While
 * one lasts, each push of a chunk that it has not reached keeps the buffer of the version: snapshot_spares buffers, and when
 * these are used up for a second the snapshot is cancelled. Workers' pulls alone look ahead: see pyps_pull. */

/* Parameters, state vectors and step counts. state is [states] pointers or NULL; steps, in global batches, is [chunks] or
 * NULL. */
PYPS_API int pyps_snapshot(pyps_store *store, float *flat, float *const *state, double *steps,
                           double timeout_seconds, uint64_t *version_out);
/* Shows `visit` the parameters of one version where they are, without a copy unless they are kept as PYPS_BF16, in
 * ascending order and in pieces of at most a chunk; `ranges` as in pyps_pull_ranges, NULL: all. It must not call this handle; the values are the
 * reader's only until it returns. What it returns, if not 0, ends the read, which returns it too. */
typedef int (*pyps_visitor)(void *context, uint64_t first, const float *values, uint64_t count);
PYPS_API int pyps_read(pyps_store *store, const pyps_range *ranges, uint64_t count, pyps_visitor visit,
                       void *context, double timeout_seconds, uint64_t *version_out);

/* ---- 5 Creating a store ---- */

enum { PYPS_SGD = 0, PYPS_MOMENTUM = 1, PYPS_ADAMW = 2, PYPS_ADAM = 3, PYPS_ADAGRAD = 4 }; /* optimizers */
enum {                                                                                     /* policies */
       PYPS_BSP = 0,
       PYPS_ASP = 1,
       PYPS_BACKUP = 2,
       PYPS_SOFTSYNC = 3,
       PYPS_SSP = 4,
       PYPS_DSSP = 5,
       PYPS_DYNSGD = 6,
       PYPS_SAPS = 9,
       PYPS_R2SP = 10,
       PYPS_HPS = 11,
       PYPS_CUSTOM = 12,
       PYPS_QUORUM = 13
};
/* What part of an optimizer step a push takes that no round waits for: its part of a global batch (the sum of the
 * planned batches), or a whole one. */
enum { PYPS_SCALE_SAMPLES = 0, PYPS_SCALE_NONE = 1 };
/* Where SaPS's threshold comes from, and what becomes of later gradients. */
enum { PYPS_FIXED = 0, PYPS_QUANTILE = 1, PYPS_RINGMASTER = 2, PYPS_MEASURED = 3 };
enum { PYPS_DROP = 0, PYPS_WEIGH = 1 };

/* A policy's parameters. Each policy reads its own; the others are 0. */
typedef struct {
    uint32_t size;
    uint32_t backup;      /* backup, quorum: gradients that a round closes without */
    uint32_t splits;      /* softsync: a step from every floor(workers / splits) gradients */
    uint32_t bound;       /* ssp, dssp: steps ahead of the slowest; saps: staleness; UINT32_MAX: no bound */
    uint32_t extra;       /* dssp: steps beyond `bound` that the fastest may get */
    uint32_t threshold;   /* saps: PYPS_FIXED ... */
    uint32_t abort;       /* saps: 1: pyps_should_continue tells a worker that is too late to abort */
    uint32_t scaling;     /* all that do not wait for rounds: PYPS_SCALE_SAMPLES ... */
    uint32_t late;        /* saps: PYPS_DROP, or PYPS_WEIGH by threshold / staleness */
    uint32_t plain_pulls; /* 1: pulls do not look ahead; see pyps_pull */
    double quantile;      /* saps: the fraction of stalenesses within the threshold */
    double slack;         /* r2sp: divides the gaps, of period / workers or as scheduled; 0: none */
    double patience;      /* r2sp: periods after which a turn that is not taken is skipped */
    double noise;    /* saps, PYPS_MEASURED: of a gradient, squared, over the true one; below 0: measured */
    double own;      /* a free value, which a policy's file explains; quorum: the grace */
    uint64_t custom; /* custom: which one */
} pyps_policy_params;

typedef struct {
    uint32_t size;
    uint32_t chunk_params;     /* parameters in a chunk, a multiple of 1024; 0: 32768 */
    uint32_t max_participants; /* 0: 64; at most 1000 */
    uint32_t snapshot_spares;  /* buffers for a strict snapshot; 0: one for each chunk, at most 64 */
    uint32_t staging_buffers;  /* of each worker, 1 to 8; 0: 2 */
    uint32_t optimizer;        /* PYPS_SGD ... */
    uint32_t policy;           /* PYPS_BSP ... */
    uint32_t ranks;  /* planned workers, 0 .. ranks-1; no step starts before all with samples have joined */
    uint32_t groups; /* parameter groups, at least 1 */
    uint32_t tensors;
    uint64_t samples;                 /* sample positions to assign in all; 0: without end */
    double round_timeout_seconds;     /* a live member that holds others up for longer is fenced; 0: 60 */
    const uint32_t *batches;          /* [ranks] planned batch of each rank; 0: it rests. One is at least 1 */
    const pyps_tensor *tensor;        /* [tensors] offset and elements are ignored */
    const float *const *initial;      /* [tensors] initial values, contiguous; NULL, or one that is: zeros */
    pyps_policy_params policy_params; /* zeros if `size` ends before it */
    uint64_t plan; /* a digest of the plan that all workers must have; 0: not said. The store only keeps it */
    uint64_t seed; /* of the order of samples, which all workers must have too, if `plan` is said */
    /* How trained parameters are kept: PYPS_F32, or PYPS_BF16: rounded at random after each step, by `seed`, version and
     * place. States, averaged tensors and all that travels stay fp32. */
    uint32_t master;
    uint32_t reserved;
} pyps_config;

/* Segments. A name is 1 to 200 letters, digits, '.', '_' or '-'; the file is PYPS_SHM_DIR (default /dev/shm)
 * "/pyps-" name. PYPS_HUGE_PAGES=1: its memory comes as huge pages. PYPS_NUMA=interleave, where it is created: its parameters
 * are spread over the nodes of memory; a gradient's memory is on its worker's. Create makes a ready store or nothing. Unlink refuses (PYPS_EBUSY) while any process has the
 * segment open; with `force` it removes the name even then. abi: as of pyps_open. */
PYPS_API int pyps_create(const char *name, uint32_t abi, const pyps_config *config, pyps_store **out);
PYPS_API int pyps_unlink(const char *name, int force);
/* Removes the name of this store's segment, held or not; PYPS_ENOENT if it has none, or another segment has it. */
PYPS_API int pyps_remove(pyps_store *store);
/* Does any process have the segment file open? PYPS_OK: no; PYPS_EBUSY: yes; else why it is not a segment. */
PYPS_API int pyps_probe(const char *name, uint64_t *bytes_out);

/* ---- 6 Watching a run ---- */

/* What a member waits for: nothing, to start, a free staging buffer, its push's turn, the end of the round. */
enum {
    PYPS_WAITS_NOT = 0,
    PYPS_WAITS_START = 1,
    PYPS_WAITS_STAGING = 2,
    PYPS_WAITS_TURN = 3,
    PYPS_WAITS_ROUND = 4
};
enum { PYPS_EMPTY = 0, PYPS_ACTIVE = 1, PYPS_FENCED = 2, PYPS_LEFT = 3, PYPS_DEAD = 4 }; /* member states */

typedef struct {
    uint64_t id;    /* never reused; 0: the slot has had no member */
    uint32_t state; /* PYPS_EMPTY ... */
    uint32_t role;
    int32_t rank; /* -1 for observers */
    uint32_t pid;
    uint64_t clock;          /* its pushes admitted */
    uint64_t pulled_version; /* the version it last pulled */
    uint64_t claim_first;
    uint32_t claim_count;
    uint32_t staged;    /* 1: its gradient waits for the round to close */
    uint32_t waits_for; /* PYPS_WAITS_NOT ... */
    uint32_t reserved;
    uint64_t bytes_pushed; /* this and the next fields, except step_seconds: since it joined */
    uint64_t bytes_pulled;
    double joined_seconds; /* how long ago */
    double waited_seconds; /* the sum of its waits for others */
    double wait_seconds;   /* how long the present wait lasts */
    double claim_seconds;  /* how long ago samples were claimed for it; 0: it holds none */
    double step_seconds;   /* of its rank, from claim to gradient: a moving average; 0: no step yet */
} pyps_member;

typedef struct {
    uint32_t batch; /* planned batch; 0: it rests */
    uint32_t reserved;
    uint64_t pushes;        /* admitted */
    uint64_t samples;       /* in admitted pushes */
    uint64_t skipped;       /* samples of skipped steps */
    uint64_t returned;      /* samples of claims that were returned to be assigned again */
    uint64_t staleness_sum; /* over its admitted pushes */
    uint64_t staleness_max;
    uint64_t residuals_dropped; /* of earlier workers of this rank, whose slot was needed */
} pyps_rank;

typedef struct {
    uint64_t sequence;           /* of the view: how many events have happened */
    uint64_t version;            /* admitted tickets */
    uint64_t round;              /* rounds closed */
    uint64_t plan;               /* times re-planned */
    uint64_t samples_assigned;   /* samples assigned; returned ones are not counted twice */
    uint64_t samples_dropped;    /* samples of returned ranges for which the list of ranges had no room */
    uint32_t active;             /* active workers */
    uint32_t all_joined;         /* 1 once every rank has joined */
    uint64_t period_nanoseconds; /* policies of turns: of a cycle, as planned or measured; 0: not known yet */
    uint64_t gap_nanoseconds;    /* policies of turns: the mean from push to push; 0: none */
    int32_t turn_rank;           /* whose turn it is; -1: the policy has no turns */
    uint32_t scheduled;          /* 1 once pyps_set_schedule has set the turns */
    uint32_t ranks;              /* at present */
    uint32_t reserved;
} pyps_status;

PYPS_API int pyps_get_status(pyps_store *store, pyps_status *out);
PYPS_API int pyps_get_members(pyps_store *store, pyps_member *out, uint32_t capacity, uint32_t *count_out);
PYPS_API int pyps_get_ranks(pyps_store *store, pyps_rank *out, uint32_t capacity);
/* The constants in force: of the last step of each group, [capacity]; zeros where there was none, and for averaged
 * groups. */
PYPS_API int pyps_get_hyper(pyps_store *store, pyps_hyper *out, uint32_t capacity);
PYPS_API int pyps_get_policy_params(pyps_store *store, pyps_policy_params *out);
/* Waits for a view later than `sequence`; a negative timeout means an hour. */
PYPS_API int pyps_wait(pyps_store *store, uint64_t sequence, double timeout_seconds);
PYPS_API int pyps_reap(pyps_store *store,
                       uint32_t *dead_out); /* remove dead members, complete their pushes */

/* A journal: from now on this handle appends every decision to the file `path`, which the handles of a run
 * share (NULL: stop). pyps_replay takes all decisions in it again, in the run's order, and counts those that
 * differ; PYPS_ECORRUPT: the file is not a journal, which neither of them then reads on or changes; nor does
 * pyps_journal follow a link. */
typedef struct {
    uint64_t events;         /* that changed the view */
    uint64_t decisions;      /* all, with those that changed nothing */
    uint64_t differences;    /* decisions that came out differently */
    uint64_t missing_events; /* not on file: their process was killed or kept no journal */
    char first[160];         /* the first difference; empty: none */
} pyps_replay_result;

PYPS_API int pyps_journal(pyps_store *store, const char *path);
PYPS_API int pyps_replay(const char *path, pyps_replay_result *out);

/* ---- 7 States ---- */

enum { PYPS_STATE_WORDS = 16 };

/* A state: all that a store needs to go on from one version, bit for bit. Gradients that wait for their round
 * have not been pushed in it, and samples that were claimed but not pushed are to be assigned again. */
typedef struct {
    pyps_rank total;
    uint64_t clock;
    uint64_t interval;                                         /* nanoseconds between its last two pushes */
    double step_seconds, sample_seconds, staleness_per_sample; /* moving averages; 0: not known */
    uint32_t next_batch, max_samples, extra_steps;             /* as its policy keeps them */
    uint32_t has_residual;                                     /* 0 or 1 */
    uint32_t turn_rank; /* policies of turns: the rank whose turn is at this place of the ring */
    uint32_t reserved;
    uint64_t turn_gap;      /* nanoseconds from its push to the next, as planned */
    pyps_data_set data_set; /* that its workers read; size 0: not known */
    double lag;             /* steps that others took between its pulls and its pushes: a moving average */
    uint64_t lags;          /* how many it is of */
} pyps_rank_state;

typedef struct {
    uint32_t size;
    uint32_t optimizer, policy, ranks, ranges;
    uint32_t chunk_params; /* this one and the next three: as configured; a restore ignores them */
    pyps_policy_params policy_params;
    double round_timeout_seconds;
    uint64_t samples;
    uint64_t version, round, plan;
    uint64_t samples_assigned; /* every sample before it was pushed, skipped or dropped, or is in `range` */
    uint64_t samples_dropped;
    uint64_t slowest, fastest; /* clocks */
    uint64_t policy_state[PYPS_STATE_WORDS];
    const pyps_rank_state *rank; /* [ranks] */
    const pyps_range *range;     /* [ranges] in the order in which they will be assigned */
    const double *steps;         /* [tensors] optimizer steps taken; a part of a global batch counts as one */
    const pyps_hyper *hyper;     /* [groups] the constants in force; NULL: none */
    /* Of averaged tensors these are not read. */
    const float *const *vectors;   /* [states * tensors] vector k of tensor t is at k * tensors + t */
    const float *const *residuals; /* [ranks * tensors] of each rank that has one; NULL: none has */
    uint64_t rounding_seed;        /* of a PYPS_BF16 master: goes on in the restored store */
    uint32_t master;               /* as configured; a restore ignores it */
    uint32_t reserved;
} pyps_state;

/* Reads a state while pushes go on, as pyps_snapshot does. Begin fills all but the last four fields; its
 * pointers are valid until the end. Then read fills flat [flat_elements], state [states][flat_elements], steps
 * [tensors] and hyper [groups], and pyps_state_residual the residual of a rank that has one [flat_elements].
 * state, steps and hyper may be NULL. PYPS_ESTALE: the snapshot was cancelled; end it, and begin again. */
PYPS_API int pyps_state_begin(pyps_store *store, double timeout_seconds, pyps_state *out);
PYPS_API int pyps_state_read(pyps_store *store, float *flat, float *const *state, double *steps,
                             pyps_hyper *hyper);
PYPS_API int pyps_state_residual(pyps_store *store, uint32_t rank, float *flat);
PYPS_API int pyps_state_end(pyps_store *store);

/* Creates a store that goes on from `state`, whose parameters are config.initial. Tensors and optimizer must be
 * those of the state. Ranks, batches, samples, chunks and policy may be others: ranks that the state does not
 * have begin anew, and those that the config does not have end; another policy begins without policy_state. No
 * step starts before all ranks have joined. */
PYPS_API int pyps_restore(const char *name, uint32_t abi, const pyps_config *config, const pyps_state *state,
                          pyps_store **out);

/* ---- 8 Planning ---- */

/* The seconds of a step of b samples: fixed + b * sample, at least `least`. */
typedef struct {
    uint32_t size;
    uint32_t max_batch; /* 0: no limit is known */
    double fixed_seconds, sample_seconds, least_seconds;
} pyps_cost_model;

enum { PYPS_TIMED_STEPS = 8 };

/* What the steps of a rank cost. */
typedef struct {
    uint64_t steps; /* whole steps of its planned batch, since that was planned or its worker joined */
    double seconds[PYPS_TIMED_STEPS]; /* of the last of them: of step k at k % PYPS_TIMED_STEPS */
    double data_seconds;              /* of these, for data: a moving average */
    double sample_seconds;            /* of any steps: a moving average; 0: no step yet */
    pyps_cost_model model;            /* as its worker knew before; zeros: it did not */
} pyps_rank_cost;

/* A turn of the ring: whose it is, and the seconds from its push to the next turn's. */
typedef struct {
    uint32_t rank;
    uint32_t reserved;
    double gap_seconds;
} pyps_turn;

/* Says what this worker's steps are expected to cost, to plan its rank's samples by. */
PYPS_API int pyps_set_cost_model(pyps_store *store, const pyps_cost_model *model);
PYPS_API int pyps_get_costs(pyps_store *store, pyps_rank_cost *out, uint32_t capacity); /* of every rank */
/* Plans the batch of each of `count` ranks anew; one of 0 lets a rank rest. `plan`: of the status that this was decided
 * on, PYPS_EPLAN if there has been another re-plan since; PYPS_ANY_PLAN. */
PYPS_API int pyps_replan(pyps_store *store, const uint32_t *batches, uint32_t count, uint64_t plan);
/* Sets the ring of a policy of turns: `count` turns in order, one of each rank, and the seconds that a cycle of
 * all of them is planned to take. Turns keep these gaps while the measured period is within 5 % of the planned
 * one, and follow the measured one otherwise; the order holds in any case. After a pyps_replan that changes
 * batches only the measured period counts. Set it before the last rank joins: the first turn follows that. */
PYPS_API int pyps_set_schedule(pyps_store *store, const pyps_turn *turns, uint32_t count,
                               double period_seconds);

/* ---- 9 Codecs ---- */

typedef struct {
    uint32_t size;
    uint32_t codec;
    uint32_t rounding;  /* PYPS_NEAREST, or for int8, int4 and nf4 PYPS_STOCHASTIC */
    uint32_t nonfinite; /* PYPS_NONFINITE_ERROR ... */
    float scale;        /* values are multiplied by it first; finite */
    uint32_t reserved;
    uint64_t seed;         /* of stochastic rounding, whose noise depends on seed and index of a value */
    uint64_t first;        /* the index of values[0], a multiple of 256 */
    const float *residual; /* [count] added to the scaled values; NULL: none */
    float *residual_out;   /* [count] the encoding error: sum - decoded; NULL: dropped */
} pyps_encode_args;

typedef struct {
    uint64_t nonfinite;      /* values that were NaN or infinite */
    uint64_t blocks_skipped; /* blocks sent as zeros because of them; their residual stays */
} pyps_encode_result;

/* Codecs, on the caller's arrays; no store is needed. Encoded data is all codes, then all scales (fp32), and
 * begins at a multiple of 4. `bytes` must be pyps_encoded_bytes(), which is 0 for an unknown codec. An encode
 * that fails with PYPS_ENONFINITE leaves `out` and `residual_out` undefined and `residual` as it was. */
PYPS_API uint64_t pyps_encoded_bytes(uint32_t codec, uint64_t count);
PYPS_API int pyps_encode(const pyps_encode_args *args, const float *values, uint64_t count, void *out,
                         uint64_t bytes, pyps_encode_result *result);
PYPS_API int pyps_decode(uint32_t codec, const void *data, uint64_t bytes, float *out, uint64_t count);

/* ---- 10 Policies ---- */

/* What a policy asks of its workers; each field is 0 or 1. See pyps_get_policy_needs. */
typedef struct {
    uint32_t uses_turns; /* a push and the pull after it are one turn: pull after each push */
    uint32_t checks_between_micro_batches; /* call pyps_should_continue between micro-batches */
    uint32_t needs_grad_norm;              /* fill grad_norm_squared in pyps_push_args */
    uint32_t resizes_batches;              /* claims follow measured speed, up to pyps_set_max_samples */
    uint32_t allows_pipeline;              /* pyps_start_ahead works: steps may overlap */
    uint32_t waits_for_rounds;             /* a worker that has pushed goes on when its round has closed */
    uint32_t starts_at_once;  /* no start waits for others: pyps_exchange in place of a push and a pull */
    uint32_t collects_pushes; /* a version may take the gradients of several pushes */
} pyps_policy_needs;

/* `params` NULL: what the policy needs under any parameters. PYPS_EPOLICY: this library has no such policy.
 */
PYPS_API int pyps_get_policy_needs(uint32_t policy, const pyps_policy_params *params, pyps_policy_needs *out);

/* A custom policy, PYPS_CUSTOM: asynchronous; asked before each step and about each gradient. Every worker's
 * process must set it before it creates or opens a store that has it. Calls that start or push may ask it
 * more than once. Its answers must depend on its arguments alone. */
typedef struct {
    uint64_t custom;                  /* pyps_policy_params.custom */
    uint64_t now;                     /* nanoseconds */
    uint64_t version, staleness;      /* staleness: versions since this worker's pull */
    uint64_t clock, slowest, fastest; /* steps: of this worker, of the slowest and the fastest */
    uint32_t rank, workers;           /* workers: the active ones */
    uint32_t samples, batch;          /* samples: held or pushed; batch: planned */
} pyps_policy_context;

/* Both return 1 for yes, 0 for no (start: wait; push: drop the gradient), -1 on failure. `shared_state` is
 * [PYPS_STATE_WORDS], shared by all workers; changes by start are kept if it returns 1. *scale, the factor of
 * the gradient, is 1 at first. */
typedef struct {
    uint32_t size;
    uint32_t reserved;
    int (*start)(const pyps_policy_context *context, uint64_t *shared_state);
    int (*push)(const pyps_policy_context *context, uint64_t *shared_state, float *scale);
} pyps_custom;

PYPS_API int pyps_set_custom(const pyps_custom *custom); /* for this process, before it has a store */

/* ---- 11 Simulation ---- */

/* The decision core alone, in virtual time: the decisions of a store, on a private view. The caller gives
 * slots, 0 .. max_participants-1, and times in nanoseconds of any clock that does not go back. */
enum {
    PYPS_ON_JOIN = 1,
    PYPS_ON_LEAVE = 2,
    PYPS_ON_REJOIN = 3,
    PYPS_ON_START = 4,
    PYPS_ON_PULL = 5,
    PYPS_ON_PUSH = 6,
    PYPS_ON_TICK = 7,
    PYPS_ON_REPLAN = 8,
    PYPS_ON_CHECK = 9,
    PYPS_ON_MAX_SAMPLES = 10,
    PYPS_ON_GATE = 11,        /* may a push be sent now? */
    PYPS_ON_START_AHEAD = 12, /* claims the samples of the step after the current one */
    PYPS_ON_SCHEDULE = 13     /* sets the turns of the ring */
};
enum { PYPS_COMMITTED = 0, PYPS_UNCHANGED = 1, PYPS_WAIT = 2, PYPS_REFUSED = 3 }; /* verdicts */

typedef struct {
    uint32_t size;
    uint32_t kind; /* PYPS_ON_... */
    uint32_t slot;
    uint32_t reserved;
    uint64_t now;
    int32_t rank;              /* join; -1: the lowest free one */
    uint32_t state;            /* leave: PYPS_LEFT or PYPS_DEAD */
    uint32_t staging, samples; /* push */
    uint32_t done, next;       /* check: samples computed, and of the next micro-batch; max_samples: next */
    uint64_t version;          /* pull: what was pulled */
    uint64_t compute_nanoseconds; /* push: from the claim to the ready gradient */
    uint64_t waited;              /* nanoseconds that the sender of a tick, or a push for its turn, waited */
    double grad_norm_squared;     /* push: of the gradient; 0: not known */
    const uint32_t *batches;      /* replan: [ranks] */
    uint64_t base_version;        /* push: 1 + the version computed on; 0: what was pulled last */
    const pyps_turn *turns;       /* schedule: [ranks] */
    double period_seconds;        /* schedule */
    uint64_t sent;             /* push: nanoseconds since its turn began, for which the gradient travelled */
    uint64_t cost_nanoseconds; /* push: what the step cost its worker; 0: as compute_nanoseconds */
    uint64_t after_plus_1;     /* start ahead: 1 + `first` of the last claim it has; 0: what was given last */
} pyps_event;

typedef struct {
    uint32_t verdict; /* PYPS_COMMITTED ... */
    uint32_t advice;  /* check */
    int32_t rank;     /* join */
    float scale;      /* push: the policy's factor of the gradient */
    uint64_t ticket;  /* of a push that became a version, or closed a round that did; else 0 */
    uint64_t staleness;
    uint64_t first;        /* start: the claim */
    uint32_t count, batch; /* start */
    uint64_t until, at;    /* wait: ask again when `progress` is at least `until`, not before the time `at` */
    uint64_t progress;     /* of the policy; never goes back */
    uint64_t version, round;
    uint64_t next_deadline; /* a tick then has work to do; 0: no time is known */
    uint64_t wake_epoch;    /* when it changes, waiting members ask again, whatever `until` says */
    float part;             /* of an optimizer step, that the last version took */
    uint32_t reserved;
} pyps_decision;

typedef struct pyps_core pyps_core;

/* Reads only max_participants, staging_buffers, policy, policy_params, ranks, batches, samples and
 * round_timeout_seconds. */
PYPS_API int pyps_core_create(const pyps_config *config, pyps_core **out);
PYPS_API void pyps_core_free(pyps_core *core); /* NULL is allowed */
PYPS_API int pyps_core_step(pyps_core *core, const pyps_event *event, pyps_decision *out);
/* The sources of the last round that became a version, in the order of summation: [capacity] slots,
 * staging_buffers, samples and scales. Returns the count. */
PYPS_API uint32_t pyps_core_sources(const pyps_core *core, uint32_t *slots, uint32_t *staging_buffers,
                                    uint32_t *samples, float *scales, uint32_t capacity);
/* The gradient of the next push, [count]. Returns 1 if the policy looks at gradients, else 0; `count` 0 only asks. */
PYPS_API int pyps_core_gradient(pyps_core *core, const float *gradient, uint64_t count);
/* How far a pull of this slot's worker looks ahead, in global batches; 0: not at all. */
PYPS_API double pyps_core_lookahead(const pyps_core *core, uint32_t slot);
PYPS_API int pyps_core_ranks(const pyps_core *core, pyps_rank *out, uint32_t capacity);
PYPS_API int pyps_core_costs(const pyps_core *core, pyps_rank_cost *out, uint32_t capacity);

/* cffi: end */

#if defined(__cplusplus)
}
#endif
#endif
