"""The demo's own text: what it searches when it is given no file, and what it looks for."""

from __future__ import annotations

QUERIES = (
    "How do plants make their food?",
    "a person who is playing an instrument",
    "Why do prices go up?",
    "What should I do to stay healthy?",
    "How does a refrigerator keep things cold?",
)

SENTENCES = (
    # Sky and space
    "Jupiter is the largest planet of the solar system.",
    "The Moon circles the Earth once in about twenty-seven days.",
    "Light from the Sun takes a little more than eight minutes to reach us.",
    "Galileo turned a small telescope to the sky and saw four moons beside Jupiter, which showed that not "
    "everything in the heavens revolves around the Earth.",
    # Living things
    "With the energy of sunlight, leaves turn water and carbon dioxide into sugar and oxygen.",
    "Bees dance to tell the others where the flowers are.",
    "The blue whale is the heaviest animal that has ever lived.",
    "Penguins cannot fly, but they are excellent swimmers.",
    "A cat sleeps for most of the day.",
    "The dog was too tired to chase the ball because it had been running all morning.",
    "Mushrooms are neither plants nor animals.",
    # The body and its health
    "Walking for half an hour every day is good for the heart.",
    "Most adults need between seven and nine hours of sleep.",
    "Vaccines teach the immune system to recognise a disease before it strikes.",
    "Wash your hands with soap before you eat.",
    # Food
    "Bread rises because yeast gives off gas as it feeds on the dough's sugars.",
    "Boil the pasta in plenty of salted water until it is firm to the bite.",
    "Coffee was first grown for drinking in Yemen.",
    "Chocolate is made from the roasted seeds of the cacao tree.",
    # History
    "The Berlin Wall fell in November 1989.",
    "Gutenberg's press made books cheap enough for ordinary people to own.",
    "The Great Wall of China was built over many centuries by several dynasties to keep out raiders from "
    "the north.",
    "In 1969 two astronauts walked on the lunar surface while a third waited in orbit.",
    "The Roman Empire once reached from Britain to Egypt.",
    # Places
    "Mount Everest stands on the border between Nepal and China.",
    "The Amazon carries more water than any other river.",
    "Paris is the capital of France.",
    "Very little rain falls in the Sahara.",
    "Tokyo's trains are famous for being on time.",
    # Computing
    "A compiler translates a program into instructions that the processor understands.",
    "Always keep a backup of the files you cannot afford to lose.",
    "Neural networks learn by adjusting millions of weights, a little at a time, until their answers agree "
    "with the examples they were shown.",
    "The password must contain at least twelve characters.",
    # Music and art
    "A woman plays the violin in the street.",
    "Mozart wrote his first symphony when he was eight years old.",
    "Visitors from all over the world queue to see the Mona Lisa in the Louvre.",
    "The band tuned their guitars before the concert.",
    # Sport
    "The match ended in a draw after extra time.",
    "A marathon is a little over forty-two kilometres long.",
    "She won the chess tournament without losing a game.",
    # Money
    "When more money chases the same amount of goods, inflation follows.",
    "The central bank raised interest rates by a quarter of a point.",
    "He put a tenth of his salary aside every month.",
    # Weather
    "Heavy snow closed the mountain pass overnight.",
    "Warm, moist air rises, cools, and forms clouds.",
)

# As long as what people embed: paragraphs of documents, of 100 to 250 of the model's tokens; it reads 256.
PASSAGES = (
    # Sky and space
    "The Moon always shows us the same face. Long ago it spun faster, but the pull of the Earth raised a "
    "bulge in its rock, and the friction of that moving bulge slowed the spin until one turn took exactly as "
    "long as one trip around us. The far side was first seen in 1959, in blurred pictures from a Soviet "
    "probe. It has fewer of the dark plains that people once took for seas, and many more craters. It is not "
    "dark: it gets as much sunlight as the near side, only at other times of the month.",
    "A star shines because hydrogen in its core is squeezed and heated until the nuclei fuse into helium, "
    "and the energy that is set free works its way outwards for many thousands of years. The weight of the "
    "gas above presses inwards, the pressure of the hot gas below pushes outwards, and for most of the "
    "star's life the two are in balance. A star like the Sun has fuel for about ten billion years, of which "
    "nearly half are over. Then it will swell into a red giant, shed its outer layers, and leave behind a "
    "white dwarf about as large as the Earth, which slowly cools. Much heavier stars burn far more quickly, "
    "and they end in an explosion that for some weeks can outshine all other stars of their galaxy together. "
    "The heavy elements made in such stars are scattered into space, where they become part of new stars and "
    "of planets.",
    # Living things
    "Green plants build their own food. Their roots draw water from the soil, and their leaves take in "
    "carbon dioxide through pores that open and close. Inside the cells of a leaf, a green pigment called "
    "chlorophyll catches light, and its energy splits the water: the oxygen escapes into the air, while the "
    "hydrogen is used to turn the carbon dioxide into sugar. The plant burns some of this sugar to stay "
    "alive, stores some as starch, and makes the rest into wood, fibre and seeds. Nearly everything that "
    "animals eat was made in this way first, and nearly all the oxygen that they breathe was once a waste "
    "product of it.",
    "Honey bees that have found good flowers tell the rest of the hive where they are. On the dark, upright "
    "comb the returning bee runs in a straight line, waggling her body, circles back, and runs again. The "
    "angle between her line and the vertical is the angle between the food and the Sun, and the longer the "
    "waggling lasts, the farther the others have to fly. Karl von Frisch, who worked this out, shared a "
    "Nobel prize for it in 1973. When a swarm looks for a new home, scouts dance for the hollow trees they "
    "have inspected, and after hours or days of such debate they all agree on one. The dance was long "
    "doubted. What settled the dispute was a mechanical bee, which could make real ones fly to a place that "
    "no bee had been to.",
    "Every autumn some birds leave for places that they have never seen. A young cuckoo, raised by parents "
    "of another species, finds its way from Europe to central Africa alone. Birds steer by the Sun, by the "
    "stars that do not set, by coastlines and rivers, and by the magnetic field of the Earth, which some of "
    "them seem to sense with their eyes. The longest known flight without a rest belongs to the bar-tailed "
    "godwit: eleven days across the Pacific, from Alaska to Tasmania, during which it lost about half of its "
    "weight. Nobody fully understands how a newly hatched bird knows the direction and the distance, but it "
    "must be inherited: blackcaps whose parents come from two populations with different routes set out in "
    "between. Some journeys are changing. Storks that once wintered beyond the Sahara now stay in Spain, "
    "where they feed on rubbish tips, and warmer springs bring many species back earlier than a century ago, "
    "though not always early enough for the insects that their chicks need.",
    # The body and its health
    "There is no secret to good health, and most of it costs nothing. Move every day: brisk walking for half "
    "an hour lowers blood pressure and lifts the mood. Eat plenty of vegetables, fruit, beans and whole "
    "grains, and less salt, sugar and processed meat. Do not smoke, and drink little alcohol or none. Sleep "
    "at regular hours, in a dark, cool room. See friends, because loneliness harms the body as well as the "
    "mind. Keep your vaccinations up to date, and have your blood pressure, teeth and eyes checked from time "
    "to time. None of these habits makes you safe from every illness, but together they add years to the "
    "average life.",
    "A vaccine shows the immune system a harmless piece of a germ, or the plan for making one. White blood "
    "cells that happen to fit the piece multiply, and some of their offspring turn into factories for "
    "antibodies. Weeks later most of these have died, but a few remain as memory cells, often for decades. "
    "When the real germ arrives, they answer within days instead of weeks, and many people never notice that "
    "they were infected. Smallpox, which killed perhaps three hundred million people in the twentieth "
    "century alone, was wiped out with a vaccine; the last natural case was a cook in Somalia in 1977. "
    "Measles needs two doses and a population of which about ninety-five percent are protected; where fewer "
    "are, it comes back within a few years.",
    "During sleep the brain is anything but idle. About every ninety minutes it passes through a cycle from "
    "light to deep sleep and on to the stage in which we dream, when the eyes dart about beneath the closed "
    "lids and the muscles of the limbs are switched off. Deep sleep prevails early in the night, dreams "
    "towards the morning. What was learned during the day is replayed and sorted, so that students who sleep "
    "after studying remember more than those who stay awake. Tests of memory, reaction and mood get worse "
    "with each night that is too short, while those concerned hardly notice how tired they have become.",
    # Food
    "To bake a simple loaf, mix five hundred grams of flour with ten grams of salt, seven grams of dried "
    "yeast and about three hundred and fifty millilitres of lukewarm water. Knead for ten minutes, until the "
    "dough is smooth and springs back. Cover it and leave it in a warm place until it has doubled in size, "
    "which takes an hour or two: the yeast feeds on sugars from the starch and gives off carbon dioxide, and "
    "the elastic gluten holds the bubbles. Press out the gas, shape the loaf, and let it rise again for "
    "forty minutes. Bake it in a very hot oven with a dish of water below, which keeps the crust soft for "
    "long enough to expand. It is ready when it sounds hollow as you tap it from beneath. Let it cool on a "
    "rack before you cut it, however good it smells: the crumb is still setting.",
    "Legend has it that a goatherd in Ethiopia noticed how lively his animals became after eating certain "
    "red berries. What is certain is that by the fifteenth century Sufi monks in Yemen brewed coffee to stay "
    "awake during their prayers. The drink spread through Mecca and Cairo to Istanbul, and with merchants "
    "from Venice to the rest of Europe. In London's coffee houses a penny bought a cup, the newspapers and "
    "the conversation, and one of them, kept by Edward Lloyd, grew into an insurance market that still bears "
    "his name.",
    # Machines and engineering
    "A refrigerator does not make cold; it carries heat from the inside to the outside. A liquid that boils "
    "at a low temperature flows through pipes behind the inner wall, evaporates there, and takes heat from "
    "the food as it does so, just as sweat cools the skin. A compressor, the part that hums, squeezes the "
    "vapour, which makes it hot. In the long coil at the back it gives this heat to the air of the kitchen "
    "and becomes liquid again, then it passes through a narrow valve, where pressure and temperature drop, "
    "and the circuit starts afresh. A heat pump that warms a house is the same machine turned around. The "
    "first machines used ammonia or sulphur dioxide, which could kill a family in its sleep when a pipe "
    "leaked. The gases that replaced them around 1930 were harmless to breathe, but they turned out to "
    "destroy the ozone high above us, and were banned by a treaty signed in Montreal in 1987. Most "
    "refrigerators today contain a few dozen grams of isobutane.",
    "Why does a ship of steel float, when a nail sinks? Water presses on everything that is dipped into it, "
    "and harder the deeper it is, so that the push from below is stronger than the push from above. The "
    "difference is exactly the weight of the water that has been pushed aside, as Archimedes found more than "
    "two thousand years ago. A nail is heavier than its own volume of water. A hull is mostly air, and it "
    "settles only until it has displaced as much water as the whole ship weighs.",
    "The arch is a way of making stones hang in the air. Each wedge-shaped block is pressed against its "
    "neighbours by the weight above it, and passes the load sideways and downwards until it reaches the "
    "ground; stone bears such pressure easily, though it would crack if it were bent like a beam. Until the "
    "last block, the keystone, is in place, the whole must rest on a wooden frame. The Romans built "
    "aqueducts, bridges and theatres from rows of arches, many of which still stand after two thousand years "
    "without any mortar. Medieval masons pointed the arch, which pushes outwards less, and caught what was "
    "left of the push with flying buttresses. In that way they could open the walls of their cathedrals for "
    "enormous windows. An arch that is turned about its axis becomes a dome; the one of the Pantheon in "
    "Rome, of plain concrete that gets lighter towards the top, is still the largest of its kind.",
    # History
    "Before Johannes Gutenberg, a book was copied by hand, and a Bible took a scribe more than a year. "
    "Around 1450, in Mainz, he brought together several inventions: single letters cast in metal, all of the "
    "same height, which could be set into a page and used again; an ink made with oil, which clung to metal; "
    "and a press like those of the winemakers. Within fifty years there were presses in some two hundred and "
    "fifty towns, and millions of books. Prices fell, spelling began to settle, and arguments that had once "
    "reached a few learned readers spread across the continent in weeks. He himself saw little of the "
    "profit: his partner sued him for the money he had lent, won, and took over the workshop together with "
    "most of the Bibles. Only about fifty of the original copies survive.",
    "On the evening of 9 November 1989 an official of the East German government read out new rules for "
    "travelling abroad at a press conference. Asked when they would take effect, he looked through his "
    "papers and said: immediately, without delay. It was a mistake, but it was on television. Thousands of "
    "people walked to the crossings in Berlin, where the guards had no orders. Shortly before midnight the "
    "officer in charge at Bornholmer Strasse gave up and opened the barrier. Strangers embraced on both "
    "sides, climbed onto the wall, and began to break pieces from it with hammers.",
    "In the summer of 1854 cholera killed hundreds of people around Broad Street in London. Most doctors "
    "blamed bad air. John Snow, a physician, went from door to door and marked the deaths on a map; they "
    "crowded around one public pump. Workers at a nearby brewery, who drank beer, had been spared, while a "
    "widow far away, who had the water sent to her because she liked its taste, had died. Snow persuaded the "
    "parish to take the handle off the pump. The outbreak was already waning, and it took years until others "
    "believed him, but his map is now seen as the birth of epidemiology.",
    # The Earth, places and weather
    "The surface of the Earth is broken into a dozen large plates, which drift about as fast as fingernails "
    "grow. Where two of them move apart, molten rock wells up and becomes new sea floor. Where they meet, "
    "one slides beneath the other and melts, which feeds chains of volcanoes, or both crumple and raise "
    "mountains: the Himalayas are still growing, because India goes on pushing into Asia. Where plates slide "
    "past each other they catch, sometimes for centuries, while the strain builds up. When the rock finally "
    "gives way, the ground leaps by metres within seconds, and that is an earthquake. Alfred Wegener "
    "proposed in 1912 that continents wander, having seen how well the coasts of Africa and South America "
    "fit together, but he could not say what moved them, and for half a century few geologists believed him.",
    "The Amazon rises in the Andes of Peru, less than two hundred kilometres from the Pacific, and flows the "
    "other way, across the whole continent to the Atlantic. It carries more water than the next seven "
    "largest rivers together, and at its mouth it makes the sea fresh far out of sight of land. For a "
    "distance of thousands of kilometres no bridge crosses it, because there are hardly any roads that one "
    "could join. When the floods come, the river rises by ten metres or more, and fish swim among the trees "
    "of the forest and eat their fruit.",
    "Thunderclouds form where warm, damp air rises quickly. High up its water freezes, and as lumps of soft "
    "hail and tiny crystals of ice collide, they become charged: the crystals are carried to the top of the "
    "cloud, and the hail stays lower down. When the difference is large enough, a current breaks through the "
    "air, within the cloud or down to the ground. The channel is only a few centimetres wide, but hotter "
    "than the surface of the Sun, and the air in it expands so violently that we hear it as thunder. Count "
    "the seconds between the two: three of them make about a kilometre. Someone in a car is safe, since the "
    "metal leads the current around the people inside. In the open, keep away from single trees and from "
    "hilltops, crouch down with your feet together, and do not lie flat.",
    # Computing
    "A computer stores a text as numbers. In the oldest codes that are still alive each letter of the "
    "English alphabet has a number below 128, which left no room for accents, let alone for Chinese. Every "
    "region then made codes of its own, and a letter written in one of them turned into gibberish in "
    "another. Unicode gives each character of all scripts one number, and UTF-8 writes these numbers as one "
    "to four bytes, such that old English texts remain as they were. Chinese signs take three bytes, most "
    "emoji four. Nearly all pages of the web are written in it today.",
    "An artificial neural network is a long chain of simple sums. Each unit multiplies its inputs by "
    "weights, adds them up, and passes the result on if it is large enough. At first the weights are random, "
    "and so are the answers. For each example in the training data one computes how wrong the answer was, "
    "and, going backwards through the layers, how each weight contributed to the error; then every weight is "
    "moved a tiny step in the direction that makes the error smaller. After millions of such steps the "
    "network recognises faces, translates or plays chess. Nobody has told it any rule, which is why it can "
    "be hard to say how it came to a decision, and why it repeats whatever prejudice its examples contained.",
    # Music and art
    "A violin is a box of thin wood that makes a string loud. The string itself moves hardly any air. As the "
    "bow is drawn across it, the sticky rosin on the hair drags it aside until it slips back, hundreds of "
    "times each second, and the bridge passes this shaking on to the belly of the instrument. A small post "
    "of spruce inside, which the French call its soul, leads it to the back. The player's left hand shortens "
    "the string to raise its pitch, and since there are no frets to guide the fingers, it takes years of "
    "practice to play in tune. The instruments that Antonio Stradivari made in Cremona three hundred years "
    "ago are sold for millions, though in blind tests listeners and even soloists often prefer new ones.",
    "Leonardo da Vinci worked on the Mona Lisa for years and never handed it over to the merchant who is "
    "thought to have ordered it, a portrait of his wife. He took it with him to France, where the king "
    "bought it. For centuries it was one admired painting among many. Then, on a Monday in August 1911, a "
    "glazier who had worked in the Louvre walked out with it under his smock. The police questioned even "
    "Picasso. Newspapers all over the world printed its picture, and crowds queued to see the empty space on "
    "the wall. When it was found in Florence two years later, it had become the most famous painting in the "
    "world. The thief said that he had wanted to return it to Italy, and served a few months in prison.",
    # Money
    "Inflation means that money buys less than it did. It can begin with demand: when people and governments "
    "spend more than the economy can produce, sellers find that they can charge more. It can begin with "
    "costs: when oil or wages become dearer, firms pass it on. And it feeds on itself, since workers who "
    "expect prices to rise ask for higher pay. Central banks try to keep it low and steady, at about two "
    "percent in many countries, by raising interest rates, so that saving becomes more attractive and "
    "borrowing less so. Falling prices are no blessing either, because buyers then put off what they could "
    "have tomorrow for less, and debts weigh more. Statisticians measure it by the cost of a basket of goods "
    "that an average household buys, from rent and bread to haircuts, and adjust the basket as habits "
    "change.",
    "Compound interest is interest on interest. Whoever puts aside a thousand pounds at five percent has a "
    "thousand and fifty after a year, and in the second year the fifty earn as well. It seems little, but "
    "after fourteen years the sum has nearly doubled, and after half a century it has grown more than "
    "elevenfold. A rule of thumb: divide seventy-two by the rate, and you have the years it takes to double. "
    "Debts grow in the same way, and those on credit cards at several times the speed.",
    # Sport
    "The marathon recalls a messenger who is said to have run from the battlefield of Marathon to Athens, "
    "cried out that the Greeks had won, and fallen down dead. For the first modern Olympic Games, in 1896, a "
    "race of about forty kilometres was held on that road, and a Greek water carrier, Spyridon Louis, won "
    "it. The odd distance of today, 42.195 kilometres, dates from the Games of 1908 in London, where the "
    "course was laid from Windsor Castle to the royal box in the stadium. Most amateurs meet a wall after "
    "thirty kilometres or so, where the sugar stored in their muscles runs out and the body has to burn fat, "
    "which is slower. The remedy is to train for months, to start slowly, and to eat on the way.",
)
