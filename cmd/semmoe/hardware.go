package main

import (
	"fmt"
	"strings"

	"github.com/spf13/pflag"

	"github.com/semmoe/operator/internal/regularfile"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/cost/hardware"
)

func hardwareFlag(f *pflag.FlagSet, into *string) {
	f.StringVar(into, "hardware", hardware.Default, "hardware profile: the name of a built-in one ("+strings.Join(hardware.Names(), ", ")+"), or a file that semmoe fit wrote")
}

// ownHardwareFlag is hardwareFlag for commands that read a plan, which tells for which machines it is.
func ownHardwareFlag(f *pflag.FlagSet, into *string) {
	f.StringVar(into, "hardware", "", "hardware profile: the name of a built-in one ("+strings.Join(hardware.Names(), ", ")+"), or a file that semmoe fit wrote (default: that of the plan)")
}

// readOwnHardware is the profile that such a flag names, or the plan's.
func readOwnHardware(named string, p *solver.Plan) (*hardware.Profile, error) {
	if named == "" {
		return p.Machines(), nil
	}
	return readHardware(named)
}

// maxInputBytes bounds a JSON file that a flag names, such as a hardware profile or a config.json. The largest known ones have less than
// 1 MiB. Parsing needs up to 100 times the size of a file in memory.
const maxInputBytes = 4 << 20

// maxProfileBytes bounds a hardware profile, of which the built-in one has 12 KiB.
const maxProfileBytes = 1 << 20

// readHardware is the profile that --hardware names: a word is a built-in one, all else a file.
func readHardware(named string) (*hardware.Profile, error) {
	if !strings.ContainsAny(named, "/.") {
		p, err := hardware.BuiltIn(named)
		if err != nil {
			return nil, usageErrorf("--hardware: %w; or name a file", err)
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
