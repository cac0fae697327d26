package main

import (
	"fmt"
	"os"
	"strings"

	"github.com/spf13/pflag"

	"github.com/semmoe/operator/solver/cost/hardware"
)

func hardwareFlag(f *pflag.FlagSet, into *string) {
	f.StringVar(into, "hardware", hardware.Default, "hardware profile: the name of a built-in one ("+strings.Join(hardware.Names(), ", ")+"), or a file that semmoe fit wrote")
}

// readHardware is the profile that --hardware names: a word is a built-in one, all else a file.
func readHardware(named string) (*hardware.Profile, error) {
	if !strings.ContainsAny(named, "/.") {
		p, err := hardware.BuiltIn(named)
		if err != nil {
			return nil, usageErrorf("--hardware: %w; or name a file", err)
		}
		return p, nil
	}
	text, err := os.ReadFile(named)
	if err != nil {
		return nil, inputError(fmt.Errorf("--hardware: %w", err))
	}
	p, err := hardware.Parse(text)
	if err != nil {
		return nil, codedError{fmt.Errorf("--hardware: %s: %w", named, err), exitInvalidFile}
	}
	return p, nil
}
