package lossless

// PromptSet names Prompts. A change of a prompt, or of how prompts are sent, changes it: answers to another set were
// recorded by another version, and still serve, since they hold the prompts that they belong to.
const PromptSet = "semmoe-prompts/1"

// Prompts are what engines are asked. Their kinds of text differ, since different kinds activate different experts, and
// each is easy to go on from, so that the most likely token stands clear of the second.
var Prompts = []string{
	"func sum(values []int) int {\n\ttotal := 0\n\tfor _, value := range values {\n\t\ttotal +=",
	"def is_even(number):\n    \"\"\"Return True if the number is even.\"\"\"\n    return",
	"SELECT customers.name, COUNT(orders.id) FROM customers JOIN orders ON orders.customer_id =",
	"{\"name\": \"Ada\", \"age\": 36, \"languages\": [\"English\", \"French\"], \"address\": {\"street\":",
	"The sun rises in the east and sets in the",
	"Montag, Dienstag, Mittwoch, Donnerstag,",
	"Il était une fois, dans un petit village, une jeune fille qui",
	"一年有四个季节：春天、夏天、",
}

const (
	// answerTokens is how many tokens answer a prompt: enough that a fault of the cache or of decoding shows, few enough
	// that a pod waits for seconds only.
	answerTokens = 16
	// alternatives is how many of the most likely tokens engines are asked for: the second tells the margin.
	alternatives = 2
)
