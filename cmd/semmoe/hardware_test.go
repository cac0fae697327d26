// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/solver/cost/hardware"
)

// slowProfile writes a hardware profile named slow with exchanges that take ten times as long as the built-in ones.
func slowProfile(t *testing.T) string {
	t.Helper()
	p := *hardware.DefaultProfile()
	p.Name, p.AllToAll.Start, p.AllToAll.PerMicrosecond = "slow", 10*p.AllToAll.Start, p.AllToAll.PerMicrosecond/10
	text, err := json.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "slow.json")
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestReadHardware(t *testing.T) {
	if p, err := cli.ReadHardware(hardware.Default); err != nil || p.Name != hardware.Default {
		t.Errorf("the built-in profile is %+v, error %v", p, err)
	}
	if p, err := cli.ReadHardware(slowProfile(t)); err != nil || p.Name != "slow" {
		t.Errorf("the profile of a file is %+v, error %v", p, err)
	}
	for named, want := range map[string]struct {
		code    int
		message string
	}{
		"abacus":        {cli.ExitUsage, "there are h200-nvlink; a file name is also allowed"},
		"./none.json":   {cli.ExitInvalidFile, "no such file"},
		"./hardware.go": {cli.ExitInvalidFile, "--hardware: ./hardware.go"},
	} {
		if _, err := cli.ReadHardware(named); err == nil || cli.ExitCode(err) != want.code || !strings.Contains(err.Error(), want.message) {
			t.Errorf("%s: %v, exit code %d; want %q, %d", named, err, cli.ExitCode(err), want.message, want.code)
		}
	}
}
