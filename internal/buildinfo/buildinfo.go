// Package buildinfo tells which build of the operator a process is, for people and as a metric.
package buildinfo

import (
	"cmp"
	"fmt"
	"runtime/debug"

	"github.com/prometheus/client_golang/prometheus"
)

// unknown is what a build does not tell, as one without a repository at hand.
const unknown = "unknown"

// Info is what the toolchain has noted in a binary.
type Info struct {
	// Version is that of the main module, Revision the commit that it was built from, with "-dirty" where files had changed since, and
	// Go the toolchain's version.
	Version, Revision, Go string
}

// Read is that of this process.
func Read() Info {
	build, ok := debug.ReadBuildInfo()
	if !ok {
		return Info{Version: unknown, Revision: unknown, Go: unknown}
	}
	return of(build)
}

func of(build *debug.BuildInfo) Info {
	settings := map[string]string{}
	for _, s := range build.Settings {
		settings[s.Key] = s.Value
	}
	revision := cmp.Or(settings["vcs.revision"], unknown)
	if settings["vcs.modified"] == "true" {
		revision += "-dirty"
	}
	return Info{Version: cmp.Or(build.Main.Version, unknown), Revision: revision, Go: cmp.Or(build.GoVersion, unknown)}
}

// String is one line for people.
func (i Info) String() string {
	return fmt.Sprintf("%s (revision %s, %s)", i.Version, i.Revision, i.Go)
}

// Metric is semmoe_build_info of this process.
func Metric() prometheus.Collector {
	build := Read()
	return prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name:        "semmoe_build_info",
		Help:        "1, with the version and the revision that the process was built from, and the Go version.",
		ConstLabels: prometheus.Labels{"version": build.Version, "revision": build.Revision, "go_version": build.Go},
	}, func() float64 { return 1 })
}
