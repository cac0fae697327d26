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

func TestMaxBodyBytes(t *testing.T) {
	for _, bytes := range []string{"-1", "9223372036854775807"} {
		if says := refusal(t, "--max-body-bytes", bytes); !strings.Contains(says, "--max-body-bytes is "+bytes+": want 0 to") {
			t.Errorf("error %v", says)
		}
	}
}

// Behind a gateway, --hold is an error.
func TestHoldBehindAGateway(t *testing.T) {
	if says := refusal(t, "--endpoint-picker", "--hold", "50ms"); !strings.Contains(says, "--hold is 50ms, but with --endpoint-picker requests do not wait") {
		t.Errorf("error %v", says)
	}
}
