// SPDX-License-Identifier: Apache-2.0

package machines

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/solver/cost/hardware"
)

// The reasons of a ProfileError, which are also condition reasons.
const (
	NotFound = "HardwareProfileNotFound"
	invalid  = "HardwareProfileInvalid"
)

// ProfileError reports a hardware profile that does not exist or is invalid. Only the user can fix it.
type ProfileError struct{ Reason, message string }

func (e *ProfileError) Error() string { return e.message }

func faultf(reason, format string, args ...any) error {
	return &ProfileError{reason, fmt.Sprintf(format, args...)}
}

// AsProfileError returns the ProfileError in the tree of err, or nil.
func AsProfileError(err error) *ProfileError {
	var fault *ProfileError
	errors.As(err, &fault)
	return fault
}

// ResolvedProfile is the hardware profile of a reference.
type ResolvedProfile struct {
	// Profile is the profile, or nil for the default profile of the operator.
	Profile *hardware.Profile
	// Digest is the SHA-256 digest of the ConfigMap key, in hexadecimal. It is empty for built-in profiles.
	Digest string
}

// Resolve resolves a reference in a namespace, with the ConfigMap that it names; nil if there is none. A nil reference
// selects the default profile. The error is a *ProfileError, whose message starts with the field below the reference.
func Resolve(of *semmoev1.HardwareReference, namespace string, configMap *corev1.ConfigMap) (ResolvedProfile, error) {
	switch {
	case of == nil:
		return ResolvedProfile{}, nil
	case of.ConfigMap == nil:
		profile, err := BuiltIn(of)
		return ResolvedProfile{Profile: profile}, err
	}
	name, key := of.ConfigMap.Name, of.ConfigMap.Key
	if configMap == nil {
		return ResolvedProfile{}, faultf(NotFound, "configMap: there is no ConfigMap %q in namespace %s: create it with the output of semmoe-lab fit under the key %q", name, namespace, key)
	}
	text, has := configMap.Data[key]
	if !has {
		return ResolvedProfile{}, faultf(NotFound, "configMap.key: ConfigMap %s has no key %q; it has %s", name, key, keysOf(configMap))
	}
	profile, err := parse(name, []byte(text))
	if err != nil {
		return ResolvedProfile{}, faultf(invalid, "configMap: key %q of ConfigMap %s is neither a hardware profile nor a calibration: %v", key, name, err)
	}
	sum := sha256.Sum256([]byte(text))
	return ResolvedProfile{Profile: profile, Digest: hex.EncodeToString(sum[:])}, nil
}

// BuiltIn returns the built-in profile of a reference. It returns nil for a nil reference, a ConfigMap, or the
// operator's default profile.
func BuiltIn(of *semmoev1.HardwareReference) (*hardware.Profile, error) {
	if of == nil || of.ConfigMap != nil || of.BuiltIn == hardware.Default {
		return nil, nil
	}
	profile, err := hardware.BuiltIn(of.BuiltIn)
	if err != nil {
		return nil, faultf(invalid, "builtIn: %v", err)
	}
	return profile, nil
}

// ReferenceForPlan returns the reference for the spec of a plan. It returns nil for the operator's default profile, with or
// without a name.
func ReferenceForPlan(of *semmoev1.HardwareReference) *semmoev1.HardwareReference {
	if of != nil && of.ConfigMap == nil && of.BuiltIn == hardware.Default {
		return nil
	}
	return of
}

// parse parses a profile, or fits a profile to a calibration. A fitted profile has the name of its ConfigMap.
func parse(name string, text []byte) (*hardware.Profile, error) {
	var head struct {
		Format string `json:"format"`
	}
	if err := json.Unmarshal(text, &head); err != nil {
		return nil, err
	}
	if head.Format != "" {
		return hardware.Parse(text)
	}
	measured, err := hardware.ParseCalibration(text)
	if err != nil {
		return nil, err
	}
	return hardware.NewProfile(name, measured.MemoryBytes, measured)
}

func keysOf(configMap *corev1.ConfigMap) string {
	if len(configMap.Data) == 0 {
		return "none"
	}
	return strings.Join(slices.Sorted(maps.Keys(configMap.Data)), ", ")
}
