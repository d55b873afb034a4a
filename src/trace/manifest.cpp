#include "trace/manifest.h"

#include <cstring>

#include "base/files.h"
#include "base/json_writer.h"
#include "base/mapped_file.h"
#include "trace/format.h"
#include "trace/trace_file.h"

namespace assay {
namespace {

// The members of one process; docs/trace-format.md, "Manifest", has their names. The caller opens and closes the
// object.
void WriteProcess(const TraceFileIndex& index, const std::string& file_name, JsonWriter* json) {
  const TraceProcess& process = index.process;
  const ProcessInfo& info = process.info;
  json->Key("file"), json->String(file_name);
  json->Key("host"), json->String(info.host);
  json->Key("pid"), json->Int(info.pid);
  json->Key("rank"), json->Int(info.rank);
  json->Key("world_size"), json->Int(info.world_size);
  json->Key("start_time_ns"), json->UInt(info.start_time_ns);
  json->Key("closed"), json->Bool(process.closed);
  json->Key("events"), json->UInt(index.event_count_hint);
  json->Key("sites"), json->UInt(process.sites.size());
  json->Key("requests"), json->UInt(process.requests.size());
  json->Key("dropped"), json->BeginObject();
  for (const auto& [reason, count] : process.drops.by_reason()) json->Key(reason), json->UInt(count);
  json->EndObject();
  json->Key("run_again"), json->String("cd " + ShellQuote(info.cwd) + " && " + ShellCommand(info.command));
  json->Key("command"), json->BeginArray();
  for (const std::string& word : info.command) json->String(word);
  json->EndArray();
  json->Key("cwd"), json->String(info.cwd);
  json->Key("meta"), json->BeginObject();
  for (const auto& [key, value] : info.meta) json->Key(key), json->String(value);
  json->EndObject();
  json->Key("coverage"), json->BeginArray();
  for (const CoverageNote& note : process.coverage) {
    json->BeginObject();
    json->Key("site"), json->String(note.site);
    json->Key("reason"), json->String(note.reason);
    json->Key("count"), json->UInt(note.count);
    json->Key("detail"), json->String(note.detail);
    json->EndObject();
  }
  json->EndArray();
  json->Key("damages"), json->BeginArray();
  for (const Damage& damage : index.damages) {
    json->BeginObject();
    json->Key("offset"), json->UInt(damage.offset);
    json->Key("what"), json->String(damage.what);
    json->EndObject();
  }
  json->EndArray();
}

// Inside single quotes a shell takes every byte as it is; a quote itself ends them, stands escaped, and begins new
// ones.
std::string SingleQuote(std::string_view word) {
  std::string quoted = "'";
  for (char c : word) {
    if (c == '\'') {
      quoted += "'\\''";
    } else {
      quoted.push_back(c);
    }
  }
  quoted.push_back('\'');
  return quoted;
}

}  // namespace

// A list of harmless bytes and not of dangerous ones: a shell that knows a further special character is safe too.
std::string ShellQuote(std::string_view word) {
  constexpr std::string_view kHarmless = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./=:,+@%";
  if (!word.empty() && word.find_first_not_of(kHarmless) == std::string_view::npos) return std::string(word);
  return SingleQuote(word);
}

std::string ShellCommand(const std::vector<std::string>& argv) {
  std::string line;
  for (const std::string& word : argv) {
    if (!line.empty()) line.push_back(' ');
    // A first word with '=' would be read as an assignment.
    const bool assignment = line.empty() && word.find('=') != std::string::npos;
    line += assignment ? SingleQuote(word) : ShellQuote(word);
  }
  return line;
}

// Processes of one trace may all do this at once as they close: each writes what it finds and the last rename wins,
// which may lack the very end of a process that closed at the same moment.
Status RebuildManifest(const std::string& dir) {
  ASSAY_ASSIGN_OR_RETURN(const std::vector<std::string> names, ListDir(dir));
  const std::string_view suffix = format::kFileSuffix;
  JsonWriter json;
  uint64_t events = 0, dropped = 0;
  json.BeginObject();
  json.Key("schema"), json.String("assay.manifest/1");
  json.Key("format"), json.String(std::to_string(format::kMajor) + "." + std::to_string(format::kMinor));
  json.Key("processes"), json.BeginArray();
  for (const std::string& name : names) {
    if (name.size() <= suffix.size() || name.substr(name.size() - suffix.size()) != suffix) continue;
    json.BeginObject();
    const Result<MappedFile> file = MappedFile::Open(dir + "/" + name);
    TraceFileIndex index;
    Status status = file.status();
    if (file.ok()) {
      const auto bytes = file.value().bytes();
      status = ReadTraceFileSummary({reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size()}, name, &index);
    }
    // A file that cannot be read keeps its place in the list with the reason, and the others are still described.
    if (status.ok()) {
      WriteProcess(index, name, &json);
      events += index.event_count_hint;
      dropped += index.process.drops.total();
    } else {
      json.Key("file"), json.String(name);
      json.Key("error"), json.String(status.message());
    }
    json.EndObject();
  }
  json.EndArray();
  json.Key("events"), json.UInt(events);
  json.Key("dropped"), json.UInt(dropped);
  json.EndObject();
  return AtomicWriteFile(dir + "/manifest.json", json.text());
}

}  // namespace assay
