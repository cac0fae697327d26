package main

import (
	"fmt"
	"strings"

	"github.com/spf13/pflag"

	"github.com/semmoe/operator/internal/files/regularfile"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/cost/hardware"
)

func hardwareFlag(f *pflag.FlagSet, into *string) {
	f.StringVar(into, "hardware", hardware.Default, "hardware profile: a built-in name ("+strings.Join(hardware.Names(), ", ")+") or a file written by semmoe fit")
}

// planHardwareFlag adds the flag --hardware, with the plan's profile as default, to commands that read a plan.
func planHardwareFlag(f *pflag.FlagSet, into *string) {
	f.StringVar(into, "hardware", "", "hardware profile: a built-in name ("+strings.Join(hardware.Names(), ", ")+") or a file written by semmoe fit (default: the plan's profile)")
}

// readPlanHardware returns the profile of the flag, or the plan's profile by default.
func readPlanHardware(named string, p *solver.Plan) (*hardware.Profile, error) {
	if named == "" {
		return p.Machines(), nil
	}
	return readHardware(named)
}

// maxInputBytes is the maximum size of a JSON input file, such as a config.json. The largest known files have less than
// 1 MiB. Parsing needs up to 100 times the file size in memory.
const maxInputBytes = 4 << 20

// maxProfileBytes is the maximum size of a hardware profile; the built-in one has 12 KiB.
const maxProfileBytes = 1 << 20

// readHardware returns the profile of --hardware: a single word is a built-in name, anything else a file.
func readHardware(named string) (*hardware.Profile, error) {
	if !strings.ContainsAny(named, "/.") {
		p, err := hardware.BuiltIn(named)
		if err != nil {
			return nil, usageErrorf("--hardware: %w; a file name is also allowed", err)
		}
		return p, nil
	}
	text, err := regularfile.Read(named, maxProfileBytes)
	if err != nil {
		return nil, inputError(fmt.Errorf("--hardware: %w", err))
	}
	p, err := hardware.Parse(text)
	if err != nil {
		return nil, codedError{fmt.Errorf("--hardware: %s: %w", named, err), exitInvalidFile}
	}
	return p, nil
}
