// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net"
	"os"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/semmoe/operator/internal/router"
	"github.com/semmoe/operator/internal/router/telemetry"
)

// telemetryFlags are the flags for spans, the access log and profiles.
type telemetryFlags struct {
	endpoint                 string
	tracePercent, logPercent int
	pprofAddress             string
}

func (f *telemetryFlags) add(command *cobra.Command) {
	flags := command.Flags()
	flags.StringVar(&f.endpoint, "otlp-endpoint", "", "URL of an OpenTelemetry collector (OTLP over HTTP) for spans of requests, such as http://collector:4318; the variables OTEL_EXPORTER_OTLP_HEADERS and OTEL_EXPORTER_OTLP_CERTIFICATE apply (default: no spans)")
	flags.IntVar(&f.tracePercent, "trace-percent", 100, "percentage of the requests without a traceparent header that get a span, with --otlp-endpoint; requests with the header keep its decision")
	flags.IntVar(&f.logPercent, "access-log-percent", 0, "percentage of the requests that are logged to standard output, one JSON object a line, without prompts (default: none)")
	flags.StringVar(&f.pprofAddress, "pprof-address", "", "host:port for profiles of the process (/debug/pprof), such as 127.0.0.1:6060 (default: closed)")
}

// complete sets the options of a router.
func (f *telemetryFlags) complete(o *router.Options) (err error) {
	for name, percent := range map[string]int{"trace-percent": f.tracePercent, "access-log-percent": f.logPercent} {
		if percent < 0 || percent > 100 {
			return fmt.Errorf("--%s is %d: want 0 to 100", name, percent)
		}
	}
	if f.endpoint != "" {
		if f.endpoint, err = telemetry.ParseEndpoint(f.endpoint); err != nil {
			return fmt.Errorf("--otlp-endpoint: %w", err)
		}
	}
	if f.pprofAddress != "" {
		_, port, err := net.SplitHostPort(f.pprofAddress)
		if _, invalid := strconv.ParseUint(port, 10, 16); err != nil || invalid != nil {
			return fmt.Errorf("--pprof-address: %q is invalid: host:port is allowed, with a port of 0 to 65535", f.pprofAddress)
		}
	}
	o.Telemetry = telemetry.Options{Endpoint: f.endpoint, TracePercent: f.tracePercent, AccessLogPercent: f.logPercent, AccessLog: os.Stdout}
	o.PprofAddress = f.pprofAddress
	return nil
}
