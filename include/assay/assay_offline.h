/* assay: reading and comparing traces, outside the host (libassay_offline). The conventions of assay.h hold; strings
 * that a function makes are freed with assay_string_free. A reader may be used by any number of threads, a stream by
 * one at a time. Traces are untrusted input: damage is skipped, counted and described, never followed. */
#ifndef ASSAY_ASSAY_OFFLINE_H
#define ASSAY_ASSAY_OFFLINE_H

#include <assay/assay.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ArrowArrayStream; /* of the Arrow C stream interface, defined by its users */

/* An open trace. */
typedef struct assay_reader assay_reader;

/* path: a trace folder, or one file of it. ASSAY_ERROR_BAD_INPUT: no trace, or of a newer major version. */
ASSAY_API int assay_reader_open(const char* path, assay_reader** reader, assay_error* error);
/* Streams and payloads that were handed out keep the trace mapped until they are released themselves. */
ASSAY_API void assay_reader_close(assay_reader* reader);

/* Number of events; they are numbered from 0 by file, then in the order of recording. */
ASSAY_API uint64_t assay_reader_count(const assay_reader* reader);
/* {"path", "processes": [...], "damages": [...]} as JSON: what was recorded, by whom, and what the trace cannot show.
 */
ASSAY_API int assay_reader_describe(const assay_reader* reader, char** json, assay_error* error);
/* One event as JSON, with its segments; the keys are those of docs/fields.md. */
ASSAY_API int assay_reader_event(const assay_reader* reader, uint64_t number, char** json, assay_error* error);
/* The payload of an event, contiguous, row-major, little-endian; *data is NULL without one. Valid while the reader is.
 */
ASSAY_API int assay_reader_payload(const assay_reader* reader, uint64_t number, const void** data, uint64_t* size_bytes,
                                   assay_error* error);
/* All events as one Arrow table, a row a segment. The caller calls stream->release; the stream outlives the reader. */
ASSAY_API int assay_reader_stream(const assay_reader* reader, struct ArrowArrayStream* stream, assay_error* error);

/* Compares two traces. tolerance: NULL or "" for derived bounds, else "1e-5,layers.*.q:1e-3". floor_path: NULL, or the
 * trace of the first run once more with its inputs disturbed in the last place. threads: 0 for all cores.
 * *json: schema assay.diff/1. *exit_code: as of `assay diff`, 0 same or noise, 1 fault, 3 incomparable. */
ASSAY_API int assay_diff_traces(const assay_reader* a, const assay_reader* b, const char* tolerance,
                                const char* floor_path, int32_t threads, char** json, int32_t* exit_code,
                                assay_error* error);

/* NULL is allowed. */
ASSAY_API void assay_string_free(char* text);

#ifdef __cplusplus
}
#endif

#endif /* ASSAY_ASSAY_OFFLINE_H */
