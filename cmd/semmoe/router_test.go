// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"strings"
	"testing"
)

func TestGatewayFlags(t *testing.T) {
	cases := map[string]struct {
		args  []string
		ports [2]int // 0 for a proxy
		tls   bool
		says  string // empty for valid flags
	}{
		"a proxy":                 {nil, [2]int{}, false, ""},
		"an endpoint picker":      {[]string{"--endpoint-picker"}, [2]int{9002, 9003}, true, ""},
		"other ports":             {[]string{"--endpoint-picker", "--ext-proc-port=1", "--health-port=2"}, [2]int{1, 2}, true, ""},
		"too many fallbacks":      {[]string{"--endpoint-picker", "--fallbacks=17"}, [2]int{}, false, "--fallbacks is 17: want 0 to 16"},
		"less than no fallbacks":  {[]string{"--endpoint-picker", "--fallbacks=-1"}, [2]int{}, false, "--fallbacks is -1: want 0 to 16"},
		"plain text":              {[]string{"--endpoint-picker", "--plaintext"}, [2]int{9002, 9003}, false, ""},
		"plain text of a proxy":   {[]string{"--plaintext"}, [2]int{}, false, "requires --endpoint-picker"},
		"certificate of a proxy":  {[]string{"--tls-cert-file=a"}, [2]int{}, false, `--tls-key-file ""`},
		"authorities of a proxy":  {[]string{"--tls-client-ca-file=a"}, [2]int{}, false, "requires --tls-cert-file"},
		"a certificate alone":     {[]string{"--endpoint-picker", "--tls-cert-file=a"}, [2]int{}, false, `--tls-key-file ""`},
		"a key alone":             {[]string{"--endpoint-picker", "--tls-key-file=b"}, [2]int{}, false, `--tls-cert-file is ""`},
		"files that are not":      {[]string{"--endpoint-picker", "--tls-cert-file=a", "--tls-key-file=b"}, [2]int{}, false, `certificate "a" with key "b"`},
		"plain text, certificate": {[]string{"--endpoint-picker", "--plaintext", "--tls-cert-file=a", "--tls-key-file=b"}, [2]int{}, false, "want one of them"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			var gateway gatewayFlags
			command := newRouterCommand()
			command.ResetFlags()
			gateway.add(command)
			if err := command.ParseFlags(tc.args); err != nil {
				t.Fatal(err)
			}
			options, err := gateway.options()
			if tc.says != "" {
				if err == nil || !strings.Contains(err.Error(), tc.says) {
					t.Fatalf("error %v, want %q", err, tc.says)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			var ports [2]int
			if options != nil {
				ports = [2]int{options.Port, options.HealthPort}
			}
			if ports != tc.ports || options != nil && (options.TLS != nil) != tc.tls {
				t.Errorf("ports %v, options %+v", ports, options)
			}
		})
	}
}

// refusal returns the error message for invalid router flags.
func refusal(t *testing.T, flags ...string) string {
	t.Helper()
	root := newRootCommand()
	root.SetArgs(append([]string{"router", "--namespace", "ns", "--selector", "a=b"}, flags...))
	root.SetOut(io.Discard)
	return fmt.Sprint(root.ExecuteContext(t.Context()))
}

func TestNamesInvalidValues(t *testing.T) {
	for _, tc := range []struct{ name, value, want string }{
		{"max-body-bytes", "-1", "want 0 to"}, {"max-body-bytes", "9223372036854775807", "want 0 to"},
		{"max-connections", "0", "want 1 to"}, {"max-connections", "9223372036854775807", "want 1 to"},
		{"endpoint-wait", "-1s", "want 0 to 24h"}, {"endpoint-wait", "2000000h0m0s", "want 0 to 24h"},
		{"client-timeout", "-1ns", "want 0 to 24h"}, {"shutdown-delay", "-1s", "want 0 to 24h"},
		{"drain-timeout", "-1s", "want 0 to 24h"}, {"drain-timeout", "25h0m0s", "want 0 to 24h"},
		{"port", "-1", "want 0 to 65535"}, {"port", "65536", "want 0 to 65535"}, {"metrics-port", "99999", "want 0 to 65535"},
		{"private-port", "-1", "want 0 to 65535"}, {"ext-proc-port", "-1", "want 0 to 65535"}, {"health-port", "65536", "want 0 to 65535"},
	} {
		want := fmt.Sprintf("--%s is %s: %s", tc.name, tc.value, tc.want)
		if says := refusal(t, "--"+tc.name, tc.value); !strings.Contains(says, want) {
			t.Errorf("error %v, want %q", says, want)
		}
	}
	for flag, want := range map[string]string{
		"--cache-tokens-per-rank=9223372036854775807": "cacheTokensPerRank: 9223372036854775807 is invalid: it must be 1 to",
		"--cap=Inf": "cap: +Inf is invalid: it must be 1 to", "--cap=NaN": "cap is NaN; it must be at least 1",
		"--weights=load=1e300":          "a weight must be 0 to 1000000",
		"--pprof-address=127.0.0.1:x":   "with a port of 0 to 65535",
		"--pprof-address=1.2.3.4:65536": "with a port of 0 to 65535",
		"--fallbacks=3":                 "--fallbacks requires --endpoint-picker",
		"--health-port=9":               "--health-port requires --endpoint-picker",
	} {
		if says := refusal(t, flag); !strings.Contains(says, want) {
			t.Errorf("%s: error %v, want %q", flag, says, want)
		}
	}
}

// Behind a gateway, --hold is an error.
func TestHoldBehindAGateway(t *testing.T) {
	if says := refusal(t, "--endpoint-picker", "--hold", "50ms"); !strings.Contains(says, "--hold is 50ms, but with --endpoint-picker requests do not wait") {
		t.Errorf("error %v", says)
	}
}
