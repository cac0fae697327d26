// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"

	"github.com/spf13/pflag"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/cost/hardware"
)

// planHardwareFlag adds the flag --hardware, with the plan's profile as default, to commands that read a plan.
func planHardwareFlag(f *pflag.FlagSet, into *string) {
	f.StringVar(into, "hardware", "", "hardware profile: a built-in name ("+strings.Join(hardware.Names(), ", ")+") or a file written by semmoe-lab fit (default: the plan's profile)")
}

// readPlanHardware returns the profile of the flag, or the plan's profile by default.
func readPlanHardware(named string, p *solver.Plan) (*hardware.Profile, error) {
	if named == "" {
		return p.Machines(), nil
	}
	return cli.ReadHardware(named)
}
