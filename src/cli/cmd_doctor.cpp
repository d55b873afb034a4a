// `assay doctor`: what this machine can do for assay, and what is broken. Facts that are merely absent (no CUDA, no
// engine) are reported and fine; only what assay needs decides the exit code.
#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "base/version.h"
#include "cli/commands.h"
#include "cli/exit_codes.h"
#include "cli/machine.h"
#include "io/json.h"
#include "model/gemm.h"
#include "probe/settings.h"
#include "stats/measure.h"

namespace assay::cli {
namespace {

// The writer reserves this much at a time (trace/writer.h, reserve_step); with less a trace cannot begin.
constexpr uint64_t kMinFreeBytes = uint64_t{64} << 20;

// One thing that assay needs; anything else is a fact of the report.
struct Check {
  std::string name;
  bool ok = true;
  std::string detail;
  std::string advice;  // what to do; empty when ok
};

// Facts and checks of one look at the machine.
struct Report {
  CpuFacts cpu;
  CudaFacts cuda;
  std::vector<EngineFact> engines;
  FolderFacts folder;
  std::vector<Isa> isa_usable;
  Isa isa_active = Isa::kPortable;
  std::string blas;
  std::vector<Check> checks;  // what assay needs

  bool ok() const {
    for (const Check& check : checks) {
      if (!check.ok) return false;
    }
    return true;
  }
};

constexpr Isa kIsas[] = {Isa::kPortable, Isa::kAvx2, Isa::kAvx512};

// ASSAY_ISA must name an instruction set of this machine; a typo would otherwise measure with another one in silence.
Check CheckForcedIsa(const Report& report) {
  Check check{"kernels", true, fmt::format("{} in use", NameOf(report.isa_active)), ""};
  const char* forced = std::getenv("ASSAY_ISA");
  if (const Status status = CheckIsaName(forced == nullptr ? "" : forced); !status.ok()) {
    check.ok = false;
    check.detail = fmt::format("{}; {} is used", status.message(), NameOf(report.isa_active));
    check.advice = "set ASSAY_ISA to one of the usable instruction sets, or unset it";
  }
  return check;
}

// Some BLAS builds are wrong on processors newer than they are.
Check CheckBlas(const std::string& description) {
  Check check{"gemm", true, description + ", self-check passed", ""};
  Status status = SetGemmThreads(1);
  if (status.ok()) status = CheckGemm();
  if (!status.ok()) {
    check.ok = false;
    check.detail = fmt::format("{}: {}", description, status.message());
    check.advice = "raise ulimit -v, set OPENBLAS_CORETYPE=Haswell, or install a newer OpenBLAS";
  }
  return check;
}

// Unset is fine: assay is off unless asked for.
Check CheckSettings(const Result<Settings>& settings) {
  if (settings.ok()) {
    return {"settings", true, settings->on() ? "ASSAY=" + settings->profile : "ASSAY is not set: recording is off", ""};
  }
  return {"settings", false, settings.status().message(), "correct the variable, see docs/settings.md"};
}

// Of the folder that the settings name, or the nearest one above it that exists.
Check CheckTraceFolder(const FolderFacts& folder) {
  Check check{"trace folder", true, fmt::format("{} is writable, {} MiB free", folder.path, folder.free_bytes >> 20),
              ""};
  if (!folder.writable) {
    check = {"trace folder", false, folder.detail, "set ASSAY_DIR to a folder that you can write to"};
  } else if (folder.free_bytes < kMinFreeBytes) {
    check.ok = false;
    check.advice = fmt::format("free space, or set ASSAY_DIR; a trace reserves {} MiB at a time", kMinFreeBytes >> 20);
  }
  return check;
}

// Everything is looked at once; both writers print the same facts.
Report Examine() {
  Report report;
  report.cpu = ReadCpuFacts();
  report.cuda = ReadCudaFacts();
  report.engines = FindEngines();
  for (const Isa isa : kIsas) {
    if (IsaUsable(isa)) report.isa_usable.push_back(isa);
  }
  report.isa_active = ActiveIsa();
  report.blas = GemmDescription();
  const Result<Settings> settings = SettingsFromEnvironment();
  report.folder = CheckFolder(settings.ok() ? settings->dir : ".");
  report.checks = {CheckForcedIsa(report), CheckBlas(report.blas), CheckSettings(settings),
                   CheckTraceFolder(report.folder)};
  return report;
}

// assay.doctor/1 of docs/json.md.
Json ToJson(const Report& report) {
  Json isa_usable = Json::array(), engines = Json::array(), checks = Json::array();
  for (const Isa isa : report.isa_usable) isa_usable.push_back(NameOf(isa));
  for (const EngineFact& engine : report.engines) {
    engines.push_back({{"name", engine.name}, {"version", engine.version}, {"where", engine.where}});
  }
  for (const Check& check : report.checks) {
    checks.push_back({{"name", check.name}, {"ok", check.ok}, {"detail", check.detail}, {"advice", check.advice}});
  }
  const CpuFacts& cpu = report.cpu;
  return {
      {"schema", "assay.doctor/1"},
      {"version", ASSAY_VERSION},
      {"ok", report.ok()},
      {"checks", checks},
      {"machine",
       {{"cpu", cpu.model},
        {"architecture", cpu.architecture},
        {"kernel", cpu.kernel},
        {"cores_usable", cpu.cores_usable},
        {"cores_online", cpu.cores_online},
        {"memory_bytes", cpu.memory_bytes},
        {"llc_bytes", cpu.llc_bytes}}},
      {"isa", {{"usable", isa_usable}, {"active", NameOf(report.isa_active)}}},
      {"gemm", report.blas},
      {"cuda", {{"present", report.cuda.present}, {"detail", report.cuda.detail}, {"devices", report.cuda.devices}}},
      {"engines", engines},
      {"trace_folder",
       {{"path", report.folder.path}, {"writable", report.folder.writable}, {"free_bytes", report.folder.free_bytes}}}};
}

std::string ToText(const Report& report) {
  const CpuFacts& cpu = report.cpu;
  std::string usable;
  for (const Isa isa : report.isa_usable) usable += fmt::format(" {}", NameOf(isa));
  std::string text = fmt::format("assay {}\n", ASSAY_VERSION);
  text += fmt::format("  machine       {} ({}), {} of {} cores, {:.1f} GiB memory, {:.1f} MiB last-level cache\n",
                      cpu.model.empty() ? "unknown processor" : cpu.model, cpu.architecture, cpu.cores_usable,
                      cpu.cores_online, static_cast<double>(cpu.memory_bytes) / (1 << 30),
                      static_cast<double>(cpu.llc_bytes) / (1 << 20));
  text += fmt::format("  kernel        {}\n", cpu.kernel);
  text += fmt::format("  instructions {} usable, {} active\n", usable, NameOf(report.isa_active));
  text += fmt::format("  CUDA          {}\n", report.cuda.detail);
  for (const std::string& device : report.cuda.devices) text += fmt::format("                {}\n", device);
  if (report.engines.empty()) text += "  engines       none found\n";
  for (size_t i = 0; i < report.engines.size(); ++i) {
    const EngineFact& engine = report.engines[i];
    text += fmt::format("  {:<13} {} {} ({})\n", i == 0 ? "engines" : "", engine.name, engine.version, engine.where);
  }
  for (const Check& check : report.checks) {
    text += fmt::format("  {:<13} {}: {}\n", check.name, check.ok ? "ok" : "BROKEN", check.detail);
    if (!check.ok) text += fmt::format("                {}\n", check.advice);
  }
  return text;
}

}  // namespace

void AddDoctorCommand(CLI::App& app, int* exit_code) {
  CLI::App* command = app.add_subcommand("doctor", "Say what this machine can do, and what is broken");
  const auto json = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "Print JSON, schema assay.doctor/1");
  command->footer(
      "Examples:\n"
      "  assay doctor\n"
      "  assay doctor --json | jq .checks\n"
      "Exits 0 when all that assay needs works, 4 when something is broken.");
  command->callback([json, exit_code] {
    const Report report = Examine();
    const std::string text = *json ? WriteJson(ToJson(report)) + "\n" : ToText(report);
    std::fwrite(text.data(), 1, text.size(), stdout);
    *exit_code = report.ok() ? kExitOk : kExitEnvironment;
  });
}

}  // namespace assay::cli
