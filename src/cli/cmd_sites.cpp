// `assay sites`: canonical names, what they are and what they are computed from.
#include <cstdio>
#include <memory>
#include <string>

#include "cli/commands.h"
#include "cli/exit_codes.h"
#include "report/sites_report.h"

namespace assay::cli {

void AddSitesCommand(CLI::App& app, int* exit_code) {
  struct Options {
    std::string pattern;
    bool json = false;
  };
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("sites", "List the canonical site names");
  command->add_option("PATTERN", options->pattern, "Glob over the names; default all");
  command->add_flag("--json", options->json, "JSON on stdout, schema assay.sites/1");
  command->footer(
      "A name stands for one tensor at one point of a decoder, the same in every engine. \"layers.N.\" has the layer\n"
      "number, J a chunk number; a sharded result before its reduction is NAME.partial. Inputs of both attention "
      "paths\n"
      "are separated by \" / \"; \"ctx:\" is read over all earlier positions; \"a|b\": whichever the model has.\n"
      "Sites marked opt-in may move a rounding when they are observed inside compiled code.\n\n"
      "Exit: 0, or 2 when no name matches PATTERN.\n\n"
      "Examples:\n"
      "  assay sites\n"
      "  assay sites 'attn.*' --json");
  command->callback([options, exit_code] {
    const std::string text =
        options->json ? WriteJson(SitesJson(options->pattern)) + "\n" : SitesText(options->pattern);
    std::fputs(text.c_str(), stdout);
    *exit_code = AnySite(options->pattern)
                     ? kExitOk
                     : Fail("sites", Status::Usage("no canonical name matches " + options->pattern));
  });
}

}  // namespace assay::cli
