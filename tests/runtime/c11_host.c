/* The header as C11, pedantic, every function once. Prints what failed; exit code 1 then. */
#include <assay/assay.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failures = 0;

static void check(int good, const char* what) {
  if (good) return;
  fprintf(stderr, "c11_host: failed: %s\n", what);
  ++failures;
}

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  assay_error error;
  assay_trace* trace = NULL;

  check(assay_open(NULL, &trace, &error) == ASSAY_OK, "open without ASSAY");
  check(trace != NULL && !assay_armed(trace), "off is a handle that is not armed");
  check(assay_arm(trace, 1, &error) == ASSAY_ERROR_USAGE, "nothing to arm");
  check(strstr(error.message, "ASSAY is off") != NULL, "the message says why");
  check(assay_close(&trace, &error) == ASSAY_OK && trace == NULL, "close when off");

  char dir[4096];
  snprintf(dir, sizeof(dir), "ASSAY_DIR=%s", argv[1]);
  const char* settings[] = {"ASSAY=all", dir, "ASSAY_LEVEL=payload"};
  const assay_pair meta[] = {{"engine", "c11_host"}};
  assay_options options = assay_options_init();
  options.settings = settings;
  options.n_settings = 3;
  options.flags = ASSAY_OPEN_NO_ENVIRONMENT;
  options.meta = meta;
  options.n_meta = 1;
  check(assay_open(&options, &trace, &error) == ASSAY_OK, error.message);
  check(assay_armed(trace) == 1, "armed");

  assay_site_info info = assay_site_info_init();
  info.name = "layers.0.attn.q";
  uint32_t site = 99;
  check(assay_add_site(trace, &info, &site, &error) == ASSAY_OK, error.message);
  check(assay_wants(trace, site, -1, -1) == 1, "wants");

  const int64_t tokens[] = {1, 2, 3};
  assay_request request = assay_request_init();
  request.tokens = tokens;
  request.n_tokens = 3;
  uint64_t key = 0;
  check(assay_add_request(trace, &request, &key, &error) == ASSAY_OK, error.message);
  check(key != 0 && key == assay_request_key(tokens, 3, 0), "request key");

  float q[3][2][2] = {{{0}}};
  const int64_t shape[] = {3, 2, 2};
  const assay_row_run run = {key, 0, 3, 0, 0, 0};
  assay_event event = assay_event_init();
  event.site = site;
  event.data = q;
  event.dtype = ASSAY_DTYPE_F32;
  event.ndim = 3;
  event.shape = shape;
  event.runs = &run;
  event.n_runs = 1;
  event.phase = ASSAY_PHASE_PREFILL;
  check(assay_record(trace, &event, &error) == ASSAY_OK, error.message);
  event.dtype = 77;
  check(assay_record(trace, &event, NULL) == ASSAY_ERROR_USAGE, "unknown dtype");
  check(assay_arm(trace, 0, NULL) == ASSAY_OK && !assay_armed(trace), "disarmed");
  check(assay_record(trace, &event, NULL) == ASSAY_OK, "disarmed records nothing");

  check(assay_coverage(trace, "logits", "absent on this path", 0, NULL, &error) == ASSAY_OK, error.message);
  check(assay_set_meta(trace, "model", "none", &error) == ASSAY_OK, error.message);
  check(assay_trigger(trace, "no ring", &error) == ASSAY_OK, error.message);
  check(assay_flush(trace, &error) == ASSAY_OK, error.message);
  assay_drop_counts drops = assay_drop_counts_init();
  check(assay_drops(trace, &drops, &error) == ASSAY_OK, error.message);
  check(drops.recorded == 1 && drops.internal == 1, "one recorded, one that did not fit");
  check(strcmp(assay_dir(trace), argv[1]) == 0, "dir");
  check(strncmp(assay_path(trace), argv[1], strlen(argv[1])) == 0, "path in dir");
  check(assay_close(&trace, &error) == ASSAY_OK, error.message);

  char text[2048];
  uint64_t size = sizeof(text);
  check(assay_settings_text(settings, 3, ASSAY_OPEN_NO_ENVIRONMENT, text, &size, &error) == ASSAY_OK, error.message);
  check(strstr(text, "ASSAY_LEVEL=payload\n") != NULL && size == strlen(text) + 1, "settings in full");
  check(strcmp(assay_dtype_name(ASSAY_DTYPE_BF16), "bf16") == 0 && assay_dtype_name(77) == NULL, "dtype names");
  check(assay_abi_version() == ASSAY_ABI_VERSION && strlen(assay_version()) >= 5, "versions");
  return failures == 0 ? 0 : 1;
}
