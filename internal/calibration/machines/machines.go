package machines

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/owned"
	"github.com/semmoe/operator/solver/cost/hardware"
)

// The reasons of a FaultError, for conditions.
const (
	NotFound = "HardwareProfileNotFound"
	Invalid  = "HardwareProfileInvalid"
)

// FaultError is a profile that is not there, or that is none: its author alone can mend it.
type FaultError struct{ Reason, message string }

func (e *FaultError) Error() string { return e.message }

func faultf(reason, format string, args ...any) error {
	return &FaultError{reason, fmt.Sprintf(format, args...)}
}

// IsFault is the fault in err's tree; nil where there is none.
func IsFault(err error) *FaultError {
	var fault *FaultError
	errors.As(err, &fault)
	return fault
}

// Chosen is a hardware profile that an object names.
type Chosen struct {
	// Profile is nil for that of the operator, as where nothing is named.
	Profile *hardware.Profile
	// Digest is the sha256 of the content of a ConfigMap, in hexadecimal; empty for profiles that are built in.
	Digest string
}

// Read reads the profile that a reference names, nil for none, in a namespace; the reader has no cache. Faults of what is named are a *FaultError, whose message
// follows the name of the reference's field.
func Read(ctx context.Context, reader client.Reader, namespace string, of *semmoev1.HardwareReference) (Chosen, error) {
	switch {
	case of == nil:
		return Chosen{}, nil
	case of.ConfigMap == nil:
		profile, err := BuiltIn(of)
		return Chosen{Profile: profile}, err
	}
	name, key := of.ConfigMap.Name, of.ConfigMap.Key
	configMap := &corev1.ConfigMap{}
	switch found, err := owned.FindLive(ctx, reader, client.ObjectKey{Namespace: namespace, Name: name}, configMap); {
	case err != nil:
		return Chosen{}, fmt.Errorf("get ConfigMap %s: %w", name, err)
	case !found:
		return Chosen{}, faultf(NotFound, "configMap: there is no ConfigMap %q in namespace %s: create it, with what semmoe fit wrote under the key %q", name, namespace, key)
	}
	text, has := configMap.Data[key]
	if !has {
		return Chosen{}, faultf(NotFound, "configMap.key: ConfigMap %s has no key %q; it has %s", name, key, keysOf(configMap))
	}
	profile, err := parse(name, []byte(text))
	if err != nil {
		return Chosen{}, faultf(Invalid, "configMap: key %q of ConfigMap %s holds no hardware profile, nor measurements for one: %v", key, name, err)
	}
	sum := sha256.Sum256([]byte(text))
	return Chosen{Profile: profile, Digest: hex.EncodeToString(sum[:])}, nil
}

// BuiltIn is the profile that a reference names which is built in; nil for none, and for the operator's default.
func BuiltIn(of *semmoev1.HardwareReference) (*hardware.Profile, error) {
	if of == nil || of.ConfigMap != nil || of.BuiltIn == hardware.Default {
		return nil, nil
	}
	profile, err := hardware.BuiltIn(of.BuiltIn)
	if err != nil {
		return nil, faultf(Invalid, "builtIn: %v", err)
	}
	return profile, nil
}

// Named is the reference that plans are told; nil for the operator's default, by whatever name.
func Named(of *semmoev1.HardwareReference) *semmoev1.HardwareReference {
	if of != nil && of.ConfigMap == nil && of.BuiltIn == hardware.Default {
		return nil
	}
	return of
}

// parse reads a profile, or fits one, which is called after its ConfigMap, to measurements.
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
