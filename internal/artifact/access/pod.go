package access

import (
	"fmt"
	"os"
	"time"

	"github.com/semmoe/operator/internal/artifact"
)

// FromPod is a client for a process in a pod that was given Env and TokenVolume.
func FromPod(retryFor time.Duration) (*artifact.Client, error) {
	url, ca := os.Getenv(URLVariable), os.Getenv(CAVariable)
	if url == "" || ca == "" {
		return nil, fmt.Errorf("the environment variables %s and %s are not set: they name the artifact store", URLVariable, CAVariable)
	}
	return artifact.NewClient(artifact.Config{URL: url, CA: []byte(ca), TokenFile: TokenFile, RetryFor: retryFor})
}
