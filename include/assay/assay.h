/* assay: the C interface of the recorder that lives inside a host process (libassay).
 *
 * Conventions
 *  1. C11, and C++ from the same file. Every symbol begins with assay_ (or a prefix of your own, see 9).
 *  2. Every input struct begins with struct_size and is made by its assay_*_init(), which sets the size and the values
 *     that mean "not said" (0 or NULL; -1 where 0 is a value of its own). A newer library reads an older caller's
 *     shorter struct; fields are only ever added at the end.
 *  3. Handles are opaque. No enum, bool, bit field or long in a struct: fixed-width integers, doubles and pointers.
 *  4. A function that can fail returns a code: 0, or one of ASSAY_ERROR_*. Codes are pinned and never reused. The last
 *     parameter takes a message, in memory of the caller; NULL is allowed. On success the message is empty.
 *  5. Everything passed in is borrowed for the call. Strings are UTF-8, end with NUL and are never NULL unless the
 *     comment says so.
 *  6. Any number of threads may call with one assay_trace, except assay_close: no other call may be under way then.
 *     After fork() the child goes on, in a file of its own in the same trace folder.
 *  7. The library never prints (but for the sink stderr, which the settings ask for), exits, aborts, throws, installs
 *     signal handlers or changes a tensor. What it cannot record it counts by reason; the counts stand in the trace.
 *     A host may ignore every return code.
 *  8. Off, a probe costs one relaxed atomic load: if (assay_armed(trace)) assay_record(trace, &event, NULL);
 *  9. Two copies in one process: build with the CMake option ASSAY_SYMBOL_PREFIX=my_, which this header honours as a
 *     macro of that name, so that every symbol is my_assay_*.
 *
 * The fields of an event are one table for C and Python: docs/fields.md. The settings: docs/settings.md. */
#ifndef ASSAY_ASSAY_H
#define ASSAY_ASSAY_H

#include <stdint.h>
#include <string.h>

#if defined(__GNUC__) || defined(__clang__)
#define ASSAY_API __attribute__((visibility("default")))
#else
#define ASSAY_API
#endif

#ifdef ASSAY_SYMBOL_PREFIX
#define ASSAY_JOIN_(a, b) a##b
#define ASSAY_JOIN(a, b) ASSAY_JOIN_(a, b)
#define assay_abi_version ASSAY_JOIN(ASSAY_SYMBOL_PREFIX, assay_abi_version)
#define assay_add_request ASSAY_JOIN(ASSAY_SYMBOL_PREFIX, assay_add_request)
#define assay_add_site ASSAY_JOIN(ASSAY_SYMBOL_PREFIX, assay_add_site)
#define assay_arm ASSAY_JOIN(ASSAY_SYMBOL_PREFIX, assay_arm)
#define assay_close ASSAY_JOIN(ASSAY_SYMBOL_PREFIX, assay_close)
#define assay_coverage ASSAY_JOIN(ASSAY_SYMBOL_PREFIX, assay_coverage)
#define assay_dir ASSAY_JOIN(ASSAY_SYMBOL_PREFIX, assay_dir)
#define assay_drops ASSAY_JOIN(ASSAY_SYMBOL_PREFIX, assay_drops)
#define assay_dtype_name ASSAY_JOIN(ASSAY_SYMBOL_PREFIX, assay_dtype_name)
#define assay_flush ASSAY_JOIN(ASSAY_SYMBOL_PREFIX, assay_flush)
#define assay_open ASSAY_JOIN(ASSAY_SYMBOL_PREFIX, assay_open)
#define assay_path ASSAY_JOIN(ASSAY_SYMBOL_PREFIX, assay_path)
#define assay_record ASSAY_JOIN(ASSAY_SYMBOL_PREFIX, assay_record)
#define assay_request_key ASSAY_JOIN(ASSAY_SYMBOL_PREFIX, assay_request_key)
#define assay_set_meta ASSAY_JOIN(ASSAY_SYMBOL_PREFIX, assay_set_meta)
#define assay_settings_text ASSAY_JOIN(ASSAY_SYMBOL_PREFIX, assay_settings_text)
#define assay_trigger ASSAY_JOIN(ASSAY_SYMBOL_PREFIX, assay_trigger)
#define assay_version ASSAY_JOIN(ASSAY_SYMBOL_PREFIX, assay_version)
#define assay_wants ASSAY_JOIN(ASSAY_SYMBOL_PREFIX, assay_wants)
#define assay_wants_name ASSAY_JOIN(ASSAY_SYMBOL_PREFIX, assay_wants_name)
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Codes ------------------------------------------------------------------------------------------------------ */

#define ASSAY_OK 0
#define ASSAY_ERROR_USAGE 2       /* an argument or setting does not exist or does not fit */
#define ASSAY_ERROR_BAD_INPUT 3   /* a trace or tensor is damaged */
#define ASSAY_ERROR_ENVIRONMENT 4 /* the machine refused: disk full, budget used up, no permission, no memory */
#define ASSAY_ERROR_INTERNAL 5    /* a fault of assay itself */

typedef struct assay_error {
  char message[1024]; /* what happened, where, what to do next; cut to fit, always ends with NUL */
} assay_error;

/* ---- Numbers of the trace format, never reused ------------------------------------------------------------------ */

#define ASSAY_DTYPE_F64 1
#define ASSAY_DTYPE_F32 2
#define ASSAY_DTYPE_F16 3
#define ASSAY_DTYPE_BF16 4
#define ASSAY_DTYPE_F8_E4M3FN 5
#define ASSAY_DTYPE_F8_E5M2 6
#define ASSAY_DTYPE_F8_E4M3FNUZ 7
#define ASSAY_DTYPE_F8_E5M2FNUZ 8
#define ASSAY_DTYPE_F8_E8M0 9
#define ASSAY_DTYPE_F4_E2M1 10 /* packed, two to a byte, the even element in the low nibble; shape counts elements */
#define ASSAY_DTYPE_I64 16
#define ASSAY_DTYPE_I32 17
#define ASSAY_DTYPE_I16 18
#define ASSAY_DTYPE_I8 19
#define ASSAY_DTYPE_U64 20
#define ASSAY_DTYPE_U32 21
#define ASSAY_DTYPE_U16 22
#define ASSAY_DTYPE_U8 23
#define ASSAY_DTYPE_BOOL 24 /* one byte, 0 or not */

#define ASSAY_PHASE_UNKNOWN 0
#define ASSAY_PHASE_PREFILL 1
#define ASSAY_PHASE_DECODE 2
#define ASSAY_PHASE_MIXED 3
#define ASSAY_PHASE_WARMUP 4
#define ASSAY_PHASE_DUMMY 5
#define ASSAY_PHASE_CAPTURE 6
#define ASSAY_PHASE_LOAD 7

#define ASSAY_FLAG_BEFORE_INPLACE 1u /* the value was taken before a later in-place write */
#define ASSAY_FLAG_IN_GRAPH 2u       /* recorded from inside a captured graph */

/* ---- Structs ---------------------------------------------------------------------------------------------------- */

/* A process's recording. Its first word is the armed flag, an int32_t that assay_armed reads; all else is hidden. */
typedef struct assay_trace assay_trace;

/* A key and a value of free metadata. Elements of an array: this struct does not grow. */
typedef struct assay_pair {
  const char* key;
  const char* value;
} assay_pair;

/* n_rows consecutive rows of the tensor, of one request, at consecutive positions; positions count from 0 at the first
 * prompt token. Elements of an array: this struct does not grow. */
typedef struct assay_row_run {
  uint64_t request;  /* assay_request_key; 0: no known request */
  int64_t first_row; /* row of the tensor, along row_axis */
  int64_t n_rows;
  int64_t first_position; /* position of first_row in its request */
  uint32_t padding;       /* 1: rows that belong to no request */
  uint32_t reserved;      /* 0 */
} assay_row_run;

#define ASSAY_OPEN_NO_ENVIRONMENT 1u /* settings alone; the process's ASSAY* variables are not looked at */

typedef struct assay_options {
  uint64_t struct_size;
  const char* const* settings; /* n_settings strings "ASSAY_LEVEL=payload"; they win over the environment */
  uint64_t n_settings;
  uint32_t flags;             /* ASSAY_OPEN_* */
  int32_t rank;               /* of this process; -1: RANK and its like in the environment, else 0 */
  int32_t world_size;         /* number of ranks; 0: WORLD_SIZE and its like in the environment, else 1 */
  uint32_t reserved;          /* 0 */
  const char* const* command; /* n_command strings, argv to run the host again; NULL: /proc/self/cmdline */
  uint64_t n_command;
  const assay_pair* meta; /* n_meta facts of the process: engine, version, model, dtype */
  uint64_t n_meta;
} assay_options;

typedef struct assay_site_info {
  uint64_t struct_size;
  const char* name;        /* canonical, "layers.3.attn.q" (`assay sites`), or the engine's own */
  const char* engine_name; /* NULL: none */
  const char* axes;        /* "T H d": T the row axis, H the head axis; NULL: the canonical name's own */
} assay_site_info;

/* One tensor at one site; docs/fields.md has the same table in words. Axes are numbered from 0. */
typedef struct assay_event {
  uint64_t struct_size;
  /* Which site: its number from assay_add_site, or its name. */
  int64_t site;            /* -1: by name */
  const char* name;        /* canonical or the engine's own; NULL with site */
  const char* engine_name; /* NULL: none */
  const char* axes;        /* as in assay_site_info; NULL: the canonical name's own */
  int32_t layer;           /* 3 makes a name that does not begin with "layers." "layers.3." + name; -1: as it is */
  int32_t rank;            /* -1: the process's */
  int64_t step;            /* of the engine; -1: not known */
  uint32_t phase;          /* ASSAY_PHASE_* */
  uint32_t flags;          /* ASSAY_FLAG_* */
  uint64_t stream;         /* identity of a stream or graph; 0: not known */
  /* The tensor. */
  const void* data;       /* base of the storage; memory that this process can read */
  const int64_t* shape;   /* ndim extents; NULL when ndim is 0 */
  const int64_t* strides; /* ndim strides in elements, 0 and negative allowed; NULL: row-major without gaps */
  int64_t offset;         /* of the first element from data, in elements */
  int32_t ndim;           /* 0..32 */
  uint32_t dtype;         /* ASSAY_DTYPE_* */
  uint32_t compute_dtype; /* coarsest rounding the value has been through (a bf16 result held in f32: bf16); or 0 */
  int32_t row_axis;       /* axis of the token rows; -1: by axes */
  int32_t head_axis;      /* axis of the heads; -1: by axes */
  uint32_t reserved;      /* 0 */
  uint64_t base_address;  /* identity of the storage, for aliasing; 0: data */
  /* Whose rows: runs, or one request and position for each row. Neither: rows of no known request, from position 0.
   * Rows in no run are not measured; rows without a row axis are an error. */
  const assay_row_run* runs;
  uint64_t n_runs;
  const uint64_t* row_requests; /* n_rows keys; NULL: 0 for all */
  /* n_rows positions; -1: a padding row. NULL: 0, 1, 2 ... in each stretch of one request */
  const int64_t* row_positions;
  uint64_t n_rows; /* of the two arrays: the extent of the row axis */
  /* Tensor parallelism: where this rank's columns lie in the whole. */
  int32_t shard_index;
  int32_t shard_count;      /* 0 or 1: not sharded */
  int64_t shard_col_offset; /* first logical column of this shard */
  int64_t shard_full_cols;  /* logical columns of the whole row; 0: the tensor's own */
  const assay_pair* meta;   /* n_meta free pairs, kept with this event */
  uint64_t n_meta;
} assay_event;

typedef struct assay_request {
  uint64_t struct_size;
  uint64_t key;          /* 0: computed from tokens and ordinal */
  const int64_t* tokens; /* n_tokens ids of the prompt; stored only with ASSAY_TOKENS=on or at level payload */
  uint64_t n_tokens;
  int64_t ordinal;       /* among equal prompts of the run, from 0 */
  const char* engine_id; /* the engine's own id; NULL: none */
} assay_request;

/* Observations that did not reach the trace, by reason. */
typedef struct assay_drop_counts {
  uint64_t struct_size; /* in: sizeof; fields beyond it are not written */
  uint64_t byte_cap;    /* ASSAY_BUDGET's events */
  uint64_t disk_full;
  uint64_t payload_budget; /* payloads alone; their events were recorded */
  uint64_t internal;       /* did not fit together, no memory, no file */
  uint64_t recorded;       /* for comparison: events recorded since the opening */
} assay_drop_counts;

/* Structs with nothing said. */
static inline assay_options assay_options_init(void) {
  assay_options options;
  memset(&options, 0, sizeof(options));
  options.struct_size = sizeof(options);
  options.rank = -1;
  return options;
}
static inline assay_site_info assay_site_info_init(void) {
  assay_site_info info;
  memset(&info, 0, sizeof(info));
  info.struct_size = sizeof(info);
  return info;
}
static inline assay_event assay_event_init(void) {
  assay_event event;
  memset(&event, 0, sizeof(event));
  event.struct_size = sizeof(event);
  event.site = -1;
  event.layer = -1;
  event.rank = -1;
  event.step = -1;
  event.row_axis = -1;
  event.head_axis = -1;
  event.shard_count = 1;
  return event;
}
static inline assay_request assay_request_init(void) {
  assay_request request;
  memset(&request, 0, sizeof(request));
  request.struct_size = sizeof(request);
  return request;
}
static inline assay_drop_counts assay_drop_counts_init(void) {
  assay_drop_counts counts;
  memset(&counts, 0, sizeof(counts));
  counts.struct_size = sizeof(counts);
  return counts;
}

/* ---- Functions -------------------------------------------------------------------------------------------------- */

/* "0.1.0", of the library. Static. */
ASSAY_API const char* assay_version(void);
/* Version of this interface; a library serves every caller whose number is not above its own. */
ASSAY_API uint32_t assay_abi_version(void);
#define ASSAY_ABI_VERSION 1u

/* Opens this process's recording by the ASSAY* variables of its environment and by options (NULL: the environment
 * alone). *trace is never NULL: with ASSAY off, unset or refused it is a handle that is not armed and on which every
 * call does nothing. ASSAY_ERROR_USAGE: a setting is wrong; ASSAY_ERROR_ENVIRONMENT: the folder cannot be written. */
ASSAY_API int assay_open(const assay_options* options, assay_trace** trace, assay_error* error);

/* Writes coverage and drop counts, closes the file and frees the handle; *trace becomes NULL. NULL is allowed. With
 * ASSAY_STRICT=on: ASSAY_ERROR_USAGE when a pattern matched no site, ASSAY_ERROR_ENVIRONMENT when something was
 * dropped. Without it, ASSAY_ERROR_ENVIRONMENT when the disk takes no more. The handle is gone in any case. */
ASSAY_API int assay_close(assay_trace** trace, assay_error* error);

/* 1 while observations are wanted: one relaxed atomic load. trace: from assay_open, not NULL. */
static inline int assay_armed(const assay_trace* trace) {
#if defined(__GNUC__) || defined(__clang__)
  return __atomic_load_n((const int32_t*)(const void*)trace, __ATOMIC_RELAXED);
#else
  return *(const volatile int32_t*)(const void*)trace;
#endif
}

/* on 0 pauses, on 1 goes on. ASSAY_ERROR_USAGE: nothing was opened, as ASSAY is off. */
ASSAY_API int assay_arm(assay_trace* trace, int32_t on, assay_error* error);

/* Announces a site; *site is its number, the same for the same name. Recording by number saves the look-up of the name,
 * and a site that is announced and never recorded stands in the trace's coverage. */
ASSAY_API int assay_add_site(assay_trace* trace, const assay_site_info* info, uint32_t* site, assay_error* error);

/* 1 when the settings let the site through at this rank and step (-1: the process's; not known). For hosts to which the
 * tensor itself is dear to make. */
ASSAY_API int assay_wants(assay_trace* trace, uint32_t site, int32_t rank, int64_t step);
/* The same by name, for a site that has not been announced and is not by this. */
ASSAY_API int assay_wants_name(assay_trace* trace, const char* name, int32_t rank, int64_t step);

/* Measures the tensor and writes the event. Reads each element of the rows once (level stats and above), on the calling
 * thread. ASSAY_ERROR_USAGE: the fields do not fit together, the message names the one; ASSAY_ERROR_ENVIRONMENT:
 * dropped. Both are counted. ASSAY_OK also when the settings leave the site out. */
ASSAY_API int assay_record(assay_trace* trace, const assay_event* event, assay_error* error);

/* The key of a request: a hash of its prompt's n_tokens ids and its ordinal among equal prompts. Never 0. */
ASSAY_API uint64_t assay_request_key(const int64_t* tokens, uint64_t n_tokens, int64_t ordinal);
/* Announces a request; *key (may be NULL) receives its key. Once a request, before or after its rows. */
ASSAY_API int assay_add_request(assay_trace* trace, const assay_request* request, uint64_t* key, assay_error* error);

/* A note on what the trace cannot show. reason: "not found", "never fired", "skipped", "absent on this path", "dummy".
 * detail: NULL or words. */
ASSAY_API int assay_coverage(assay_trace* trace, const char* site, const char* reason, uint64_t count,
                             const char* detail, assay_error* error);
/* A fact of the process; a later value of the same key wins. */
ASSAY_API int assay_set_meta(assay_trace* trace, const char* key, const char* value, assay_error* error);
/* On-anomaly (ASSAY_RING): writes out what the ring holds. reason becomes metadata. Nothing without a ring. */
ASSAY_API int assay_trigger(assay_trace* trace, const char* reason, assay_error* error);

/* Forces the file to disk, against loss of power. A killed process loses nothing that was recorded, flushed or not. */
ASSAY_API int assay_flush(assay_trace* trace, assay_error* error);
/* counts->struct_size must be set. */
ASSAY_API int assay_drops(const assay_trace* trace, assay_drop_counts* counts, assay_error* error);
/* The trace folder, and this process's file in it. Empty when off or with the sink stderr. Valid until the close; the
 * file's name changes in a child of fork(). */
ASSAY_API const char* assay_dir(const assay_trace* trace);
ASSAY_API const char* assay_path(const assay_trace* trace);

/* Parses settings as assay_open would and writes them out in full, "NAME=VALUE\n" each, ending with NUL. *size: in,
 * bytes of buffer; out, bytes needed, the NUL included. A buffer that is too small (or NULL) is ASSAY_OK with nothing
 * written but *size. flags: ASSAY_OPEN_*. */
ASSAY_API int assay_settings_text(const char* const* settings, uint64_t n_settings, uint32_t flags, char* buffer,
                                  uint64_t* size, assay_error* error);

/* "bf16" for ASSAY_DTYPE_BF16; NULL for an unknown number. Static. */
ASSAY_API const char* assay_dtype_name(uint32_t dtype);

#ifdef __cplusplus
}
#endif

#endif /* ASSAY_ASSAY_H */
