// SPDX-License-Identifier: Apache-2.0

package buildinfo

import (
	"runtime/debug"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/semmoe/operator/test/metricsdoc"
)

func TestInfo(t *testing.T) {
	for want, build := range map[string]debug.BuildInfo{
		"v1.2.3 (revision abc, go1.26.0)": {
			GoVersion: "go1.26.0", Main: debug.Module{Version: "v1.2.3"}, Settings: []debug.BuildSetting{{Key: "vcs.revision", Value: "abc"}},
		},
		"(devel) (revision abc-dirty, go1.26.0)": {
			GoVersion: "go1.26.0", Main: debug.Module{Version: "(devel)"},
			Settings: []debug.BuildSetting{{Key: "vcs.revision", Value: "abc"}, {Key: "vcs.modified", Value: "true"}},
		},
		"unknown (revision unknown, unknown)": {},
	} {
		if got := of(&build).String(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

func TestMetrics(t *testing.T) {
	registry := prometheus.NewRegistry()
	registry.MustRegister(Metric())
	metricsdoc.Check(t, "../../../docs/metrics.md", "builds", registry)
}
