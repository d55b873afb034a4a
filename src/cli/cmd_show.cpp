// `assay show TRACE`: what was recorded, one table a step.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/glob.h"
#include "cli/commands.h"
#include "cli/exit_codes.h"
#include "probe/settings.h"
#include "report/show_report.h"
#include "report/text_table.h"

namespace assay::cli {
namespace {

struct Options {
  std::string path;
  std::vector<std::string> requests;  // keys in hexadecimal
  ShowOptions show;
  bool json = false;
};

// "; there is no site X, the nearest is Y" for the first glob that matches no site of the trace.
std::string NearestSite(const Trace& trace, const std::vector<std::string>& globs) {
  const std::vector<std::string_view> names(trace.site_names().begin(), trace.site_names().end());
  for (const std::string& glob : globs) {
    if (std::any_of(names.begin(), names.end(), [&](std::string_view name) { return GlobMatches(glob, name); })) {
      continue;
    }
    const std::string_view nearest = NearestName(glob, names);
    return "; no site matches " + glob + (nearest.empty() ? "" : ", the nearest is " + std::string(nearest));
  }
  return {};
}

// Prints what passes the filters, then judges: nothing passing is usage, damage is bad input.
int RunShow(Options options) {
  auto trace = Trace::Open(options.path);
  if (!trace.ok()) return Fail("show", trace.status());
  for (const std::string& text : options.requests) {
    char* end = nullptr;
    const uint64_t key = std::strtoull(text.c_str(), &end, 16);
    // Longer ones would be cut to 64 bits.
    if (text.empty() || *end != '\0' || text.size() > 16) {
      return Fail("show", Status::Usage("--request " + text +
                                        " is not a key in hexadecimal; `assay show --json` lists "
                                        "the keys under \"requests\""));
    }
    // The tables print the first eight digits.
    bool found = false;
    for (const TraceProcess& process : (*trace)->processes()) {
      for (const RequestInfo& request : process.requests) {
        if (request.key != key && (text.size() != 8 || request.key >> 32 != key)) continue;
        options.show.requests.push_back(request.key);
        found = true;
      }
    }
    if (!found) options.show.requests.push_back(key);
  }
  const ShowModel model = MakeShowModel(**trace, options.show);
  const std::string text = options.json ? WriteJson(ShowJson(**trace, model)) + "\n"
                                        : Printable(ShowText(**trace, model, options.show.wide), true);
  std::fputs(text.c_str(), stdout);
  const bool damaged = SayDamages("show", **trace);
  if (model.matching == 0 && model.total > 0) {
    return Fail("show", Status::Usage("none of the " + std::to_string(model.total) + " events of " + options.path +
                                      " passes the filters" + NearestSite(**trace, options.show.sites)));
  }
  return damaged ? kExitBadInput : kExitOk;
}

}  // namespace

void AddShowCommand(CLI::App& app, int* exit_code) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("show", "Print what a trace holds, one table a step");
  command->add_option("TRACE", options->path, "Trace folder or file")->required();
  command->add_option("--site", options->show.sites, "Glob over canonical names; repeatable")->take_all();
  command->add_option("--rank", options->show.ranks, "Ranks, comma-separated")->delimiter(',')->allow_extra_args(false);
  command->add_option("--step", options->show.steps, "Steps, comma-separated")->delimiter(',')->allow_extra_args(false);
  command->add_option("--request", options->requests, "Request keys in hexadecimal (8 or 16 digits), comma-separated")
      ->delimiter(',');
  command->add_option("--limit", options->show.limit, "Events to show; 0: all");
  CLI::Option* wide =
      command->add_flag("--wide", options->show.wide, "Strides, addresses, digests and the engine's names as well");
  CLI::Option* json = command->add_flag("--json", options->json, "JSON on stdout, schema assay.show/1");
  wide->excludes(json);  // which has everything
  command->footer(
      "Statistics are those of the rows shown; rows read REQUEST:FIRST-LAST (positions). L2 is the Euclidean norm.\n"
      "At the end: sites that were asked for and not seen, dropped events, damaged records.\n"
      "Exit: 0, 2 when no event passes the filters, or 3 when records or the\n"
      "payloads of events shown were damaged (a torn tail is normal).\n\n"
      "Examples:\n"
      "  assay show run.trace --site 'layers.0.attn.*' --step 0\n"
      "  assay show run.trace --rank 3 --json");
  command->callback([options, exit_code] { *exit_code = RunShow(*options); });
}

}  // namespace assay::cli
