// SPDX-License-Identifier: Apache-2.0

// Package buildinfo returns the version of the running binary, as text and as a metric.
package buildinfo

import (
	"cmp"
	"fmt"
	"runtime/debug"

	"github.com/prometheus/client_golang/prometheus"
)

// unknown replaces values that the binary does not contain, for example after a build outside a repository.
const unknown = "unknown"

// Info is the build information that the Go toolchain stores in a binary.
type Info struct {
	// Version is the version of the main module. Revision is the commit, with the suffix "-dirty" if files were
	// changed. Go is the version of the toolchain.
	Version, Revision, Go string
}

// Read returns the build information of this process.
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

// String formats the build information as one line.
func (i Info) String() string {
	return fmt.Sprintf("%s (revision %s, %s)", i.Version, i.Revision, i.Go)
}

// Metric returns the metric semmoe_build_info of this process.
func Metric() prometheus.Collector {
	build := Read()
	return prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name:        "semmoe_build_info",
		Help:        "1, with the version and the revision that the process was built from, and the Go version.",
		ConstLabels: prometheus.Labels{"version": build.Version, "revision": build.Revision, "go_version": build.Go},
	}, func() float64 { return 1 })
}
