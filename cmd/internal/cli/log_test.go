// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"strings"
	"testing"

	"github.com/go-logr/logr"
	"github.com/spf13/pflag"
)

// TestLogLevel checks that --log-level selects the messages of the logger by verbosity.
func TestLogLevel(t *testing.T) {
	for _, c := range []struct {
		args    []string
		enabled int
	}{{nil, 0}, {[]string{"--log-level=1"}, 1}, {[]string{"--log-level=9"}, maxLogLevel}} {
		var level int
		flags := pflag.NewFlagSet("test", pflag.ContinueOnError)
		LogLevelFlag(flags, &level)
		if err := flags.Parse(c.args); err != nil {
			t.Fatal(err)
		}
		log := logr.FromContextOrDiscard(WithLogger(t.Context(), "test", level))
		if !log.V(c.enabled).Enabled() || log.V(c.enabled+1).Enabled() {
			t.Errorf("%v: the logger does not stop at verbosity %d", c.args, c.enabled)
		}
	}
	for _, invalid := range []string{"10", "-1", "debug", ""} {
		var level int
		flags := pflag.NewFlagSet("test", pflag.ContinueOnError)
		LogLevelFlag(flags, &level)
		if err := flags.Parse([]string{"--log-level=" + invalid}); err == nil || !strings.Contains(err.Error(), "0 to 9") {
			t.Errorf("--log-level=%s: error %v, want one that names the allowed numbers", invalid, err)
		}
	}
}
